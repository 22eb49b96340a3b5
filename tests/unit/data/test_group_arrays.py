"""A group comes back from its bytes as it was, in every field, and takes few of them."""

import math
import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from torchtitan.grpo.data.group_arrays import from_bytes, to_bytes
from torchtitan.grpo.data.kept_tokens import KEPT_MAX, KeptTokens
from torchtitan.grpo.data.samples import Group, Prompt, Sample, TopTokens

TEXTS = ["", "plain", "é 日本\n\t", "a\ud800b", 'quo"te\\', "\x00"]
JSON_VALUES = [None, True, 0, -(2**60), 0.1, 1e300, "é\udfff", [1, [2.5, None]], {"a": {"b": []}}]


def some_prompt(chance: random.Random) -> Prompt:
    columns = {chance.choice(TEXTS): chance.choice(JSON_VALUES) for _ in range(chance.randint(0, 3))}
    ids = [chance.randrange(2**31) for _ in range(chance.randint(0, 5))]
    functions = tuple(chance.sample(["f", "g", "pkg.mod:h"], chance.randint(0, 3)))
    text, answer, source = (chance.choice(TEXTS) for _ in range(3))
    return Prompt(chance.randrange(2**40), ids, text, answer, columns, source, functions)


def some_logprobs(chance: random.Random, tokens: int) -> list[float]:
    """float32 numbers as servers send them, or any: of a text with few digits, or computed by an environment."""
    exact = chance.random() < 0.5
    values = [chance.choice([-chance.random(), 0.0, -0.0, -9999.0, -1e-40, -1e300, -math.inf]) for _ in range(tokens)]
    with np.errstate(over="ignore"):
        return [float(np.float32(value)) for value in values] if exact else values


def some_sample(chance: random.Random, prompt: Prompt, k: int) -> Sample:
    tokens = chance.choice([0, 1, 2, 7, 40])
    ids = [chance.randrange(2**31) for _ in range(tokens)]
    first = chance.choice([0, 7, 70_000, 2**31 - 2])
    one_version, all_sampled = chance.random() < 0.5, chance.random() < 0.5
    versions = [first + (0 if one_version else chance.randint(0, 1)) for _ in ids]
    sample = Sample(prompt, ids, some_logprobs(chance, tokens), versions, chance.choice(["stop", "length", "abort"]))
    if chance.random() < 0.5:
        sample.loss_mask = [all_sampled or chance.random() < 0.5 for _ in ids]
    sample.text = chance.choice(TEXTS)
    sample.rewards = {chance.choice(TEXTS): chance.choice([0.1, 1, True, 1e38]) for _ in range(chance.randint(0, 2))}
    sample.reward = chance.choice([None, 1 / 3, -0.0, 1, 1e38])
    sample.reward_failures = {"g": chance.choice(TEXTS)} if chance.random() < 0.3 else {}
    sample.servers = [(i, f"http://{chance.choice('ab')}:1") for i in range(0, tokens, 3)]
    if k and chance.random() < 0.6:
        sample.teacher_logprobs = some_logprobs(chance, tokens)
    if k and chance.random() < 0.6:
        shape = (tokens, k)
        draw = np.random.default_rng(chance.randrange(2**32))
        top_logprobs = np.where(draw.random(shape) < 0.2, -np.inf, -draw.random(shape)).astype(np.float32)
        sample.top = TopTokens(draw.integers(-1, 2**31 - 1, shape, np.int32), top_logprobs)
    if chance.random() < 0.4:
        counts = np.array([chance.choice([0, 1, 5]) for _ in ids], np.int32)
        sample.kept = KeptTokens(counts, np.arange(counts.sum(), dtype=np.int32) + chance.randrange(2**20))
    return sample


def assert_same(found: Group, group: Group) -> None:
    assert found == group
    for ours, theirs in zip(found, group, strict=True):
        # Equality takes 1 for 1.0 and True, and 0.0 for -0.0; it passes over arrays.
        for field in fields(Sample):
            value, expected = getattr(ours, field.name), getattr(theirs, field.name)
            if field.compare:
                assert repr(value) == repr(expected), field.name
        tops = [(each.ids, each.logprobs) if each else () for each in (ours.top, theirs.top)]
        routes = [() if each is None else (each,) for each in (ours.routes, theirs.routes)]
        kept = [() if each is None else (each.counts, each.ids) for each in (ours.kept, theirs.kept)]
        for mine, their in (tops, routes, kept):
            assert len(mine) == len(their)
            for array, expected in zip(mine, their, strict=True):
                assert array.dtype == expected.dtype and np.array_equal(array, expected)


@pytest.mark.parametrize("seed", range(100))
def test_any_group_is_the_same_again(seed):
    chance = random.Random(seed)
    group: Group = []
    prompts = [some_prompt(chance) for _ in range(chance.randint(1, 2))]  # an environment may give another beginning
    k, routed, dtype = chance.choice([0, 1, 3]), chance.random() < 0.3, chance.choice([np.uint8, np.int16])
    for _ in range(chance.randint(0, 5)):
        sample = some_sample(chance, chance.choice(prompts), k)
        if routed and chance.random() < 0.7:
            positions = max(0, len(sample.prompt.token_ids) + len(sample.token_ids) - 1)
            draw = np.random.default_rng(chance.randrange(2**32))
            sample.routes = draw.integers(0, 100, (positions, 3, 2)).astype(dtype)
        group.append(sample)
    data = to_bytes(group)
    found = from_bytes(memoryview(data))
    assert_same(found, group)
    assert to_bytes(found) == data
    for ours, theirs in zip(found, group, strict=True):  # one object where it was one
        same = [each for each, of in zip(found, group, strict=True) if of.prompt is theirs.prompt]
        assert all(each.prompt is ours.prompt for each in same)


@pytest.mark.parametrize(("digits", "most"), [(None, 14), (6, 18)], ids=["float32", "any"])
def test_a_plain_sample_takes_few_bytes(digits, most):
    draw = np.random.default_rng(0)
    logprobs = draw.normal(size=8192).astype(np.float32).tolist()
    logprobs = logprobs if digits is None else [round(value, digits) for value in logprobs]
    versions = [3] * 5000 + [4] * 3192
    servers = [(0, "http://node-1:8000"), (5000, "http://node-2:8000")]
    prompt = Prompt(1, [1] * 200, "what is " * 100)
    group = [
        Sample(prompt, draw.integers(0, 150_000, 8192).tolist(), logprobs, versions, "stop", None, "four" * 8192)
        for _ in range(8)
    ]
    for sample in group:
        sample.servers, sample.reward = servers, 1.0
    assert len(to_bytes(group)) / (8 * 8192) < most
    assert from_bytes(to_bytes(group)) == group


def test_likeliest_tokens_of_another_number_than_the_newest_group_has_are_left_out():
    """As after a resume with another [grpo] score_centering."""
    group = []
    for k in (4, 2):
        sample = Sample(Prompt(0, [1], ""), [5, 6], [-0.5, -0.5], [0, 0], "stop")
        sample.top = TopTokens(np.arange(2 * k, dtype=np.int32).reshape(2, k), np.full((2, k), -2.0, np.float32))
        group.append(sample)
    before, now = from_bytes(to_bytes(group))
    assert before.top is None and now.top.ids.tolist() == [[0, 1], [2, 3]]


def test_no_position_keeps_more_tokens_than_a_server_has_room_for():
    assert KeptTokens.of([list(range(KEPT_MAX))], [0], 9000).counts.tolist() == [KEPT_MAX]
    with pytest.raises(ValueError, match="4097 tokens were kept at a position"):
        KeptTokens.of([list(range(KEPT_MAX + 1))], [0], 9000)


def test_what_json_has_no_words_for_is_text_and_stops_no_save():
    """As in the columns of a dataset's row. An environment may keep anything there."""
    (sample,) = from_bytes(
        to_bytes([Sample(Prompt(0, [1], "q", columns={"at": Path("/a")}), [2], [-1.0], [0], "stop")])
    )
    assert sample.prompt.columns == {"at": "/a"}


def test_of_what_an_environment_keeps_in_a_prompt_texts_are_left():
    columns = {"question": "?", "seen": {3}, (1, 2): "no name"}
    circle: list = []
    circle.append(circle)
    for own in ({}, {"circle": circle}, {"many": 10**5000, "seen": {3}}):
        prompt = Prompt(0, [1], "", columns=columns | own)
        (found,) = from_bytes(to_bytes([Sample(prompt, [5], [-0.5], [0], "stop")]))
        assert found.prompt.columns.pop("circle", "[[...]]") == "[[...]]"
        assert found.prompt.columns.pop("many", "").endswith("that cannot be shown)" if "many" in own else "")
        assert found.prompt.columns == {"question": "?", "seen": "{3}"}
