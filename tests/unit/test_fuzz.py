"""What comes from outside, at random: configurations, servers' replies, rows of data, bucket plans, answers.

Bad input is a UserError or an EngineError, never a traceback, and never takes long. In a test run the examples are few
and always the same. The long form draws new ones, FUZZ_EXAMPLES for each test:

    FUZZ_EXAMPLES=20000 python -m pytest tests/unit/test_fuzz.py -q --timeout 3600

A case that is found becomes a plain test beside the code that it broke.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.config.keys import keys, toml
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.samples import FinishReason, Prompt
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.sglang import SglangClient
from torchtitan.grpo.engines.vllm import VllmClient
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rewards.functions import exact_match, math_verify, numeric_match
from torchtitan.grpo.weight_wire.buckets import (
    WIRE_DTYPES,
    Checksum,
    TensorSpec,
    plan_buckets,
    plan_from_json,
    plan_to_json,
)
from torchtitan.grpo.weight_wire.receiver import PROTOCOL, Receiver

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
WHOLE = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**400])
NUMBERS = WHOLE | st.floats() | st.sampled_from([5e-324, 1e-45, 1e300, math.nan, math.inf])


def fuzz(examples: int, **strategies: Any) -> Callable:
    """Run a test on random arguments. One example may take 10 s, on a busy machine too."""
    limits = settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=timedelta(seconds=10),
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: limits(given(**strategies)(test))


def mutated(values: Any, value: st.SearchStrategy, path: tuple = ()) -> st.SearchStrategy:
    """`values` (JSON) with one or two of its leaves or branches replaced or left out."""

    def paths(node: Any, path: tuple = ()) -> list[tuple]:
        inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return [path, *(p for name, each in inner for p in paths(each, (*path, name)))]

    def change(drawn: tuple[list[tuple], list[Any], bool]) -> Any:
        result = json.loads(json.dumps(values))
        where, new, remove = drawn
        for path, each in zip(where, new, strict=False):
            node = result
            for name in path[:-1]:
                node = node[name] if isinstance(node, dict | list) and _has(node, name) else None
            if not path:
                result = each
            elif isinstance(node, dict | list) and _has(node, path[-1]):
                if remove:
                    del node[path[-1]]
                else:
                    node[path[-1]] = each
        return result

    chosen = st.lists(st.sampled_from(paths(values)), min_size=1, max_size=2)
    return st.tuples(chosen, st.lists(value, min_size=2, max_size=2), st.booleans()).map(change)


def _has(node: dict | list, name: Any) -> bool:
    return name in node if isinstance(node, dict) else isinstance(name, int) and name < len(node)


# ---------------------------------------------------------------------------------------------------- configurations

KEY = st.sampled_from(sorted(keys())) | st.text(max_size=12) | st.sampled_from(["grpo.", ".", "a.b.c", "no_x", "-h2"])
VALUE = NUMBERS | st.booleans() | st.text(max_size=12) | st.sampled_from(["~\0", "%s{0}", "x" * 5000, "(" * 5000, "²"])


EDGES = {
    bool: [True, False],
    int: [-1, 0, 1, 7, 10**9 + 1, 2**31, 2**64, 10**400],
    float: [-1.0, 0.0, 5e-324, 0.3, 1e300, math.nan, math.inf, 10**400],
    str: ["", "~\0", "%s{0}", "²", "a:b", ":", "(.)", "(" * 5000, "(a{99999999999})", "x" * 5000, "\n\u2028"],
    dict: [{}, {"max": 10**400}, {"a": {}}],
}


def edges(kind: Any) -> list:
    """Values of a key's type, at the ends of what it can hold and beyond."""
    if get_origin(kind) is list:
        return [[], *([each] for each in edges(get_args(kind)[0])), edges(get_args(kind)[0])]
    if get_origin(kind) is Literal:
        return [*get_args(kind), "x"]
    if get_args(kind):  # a union
        return [value for each in get_args(kind) for value in edges(each)]
    return EDGES.get(kind, [])


ENTRY = st.tuples(KEY, VALUE | st.lists(VALUE, max_size=3)) | st.sampled_from(sorted(keys())).flatmap(
    lambda key: st.tuples(st.just(key), st.sampled_from(edges(keys()[key].type)))
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Flags of a model that has room for the default lengths: a dry run describes the defaults."""
    folder = shutil.copytree(TINY_QWEN3, tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--model.hf_assets_path", str(folder)]
    assert accepted(flags)
    return flags


def accepted(argv: list[str]) -> bool:
    """A configuration is refused by a short UserError, or a dry run describes it."""
    try:
        assert describe(load_config(argv), 1)
        return True
    except UserError as error:
        assert 0 < len(str(error)) < 5000
        return False


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in keys()}))
def test_every_key_at_its_edges(tmp_path, model, section):
    file = tmp_path / "run.toml"
    for path, key in keys().items():
        for value in edges(key.type) if path.startswith(f"{section}.") else ():
            file.write_text(f"{path} = {toml(value)}")
            accepted(["--job.config_file", str(file), *model])


@fuzz(150, entries=st.lists(ENTRY, max_size=3))
def test_any_configuration_file(tmp_path, model, entries):
    path = tmp_path / "run.toml"
    lines = [f"{json.dumps(key)[1:-1] if key in keys() else json.dumps(key)} = {toml(value)}" for key, value in entries]
    path.write_text("\n".join(lines))
    accepted(["--job.config_file", str(path), *model])


@fuzz(50, content=st.binary(max_size=60) | st.text("[]{}=.,'\"#\n a1_", max_size=60).map(str.encode))
def test_any_bytes_as_configuration_file(tmp_path, model, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    accepted(["--job.config_file", str(path), *model])


@fuzz(150, flags=st.lists(st.tuples(KEY, st.sampled_from([" ", "=", ""]), VALUE), max_size=4))
def test_any_command_line(model, flags):
    words = [f"--{key}={value}" if sign == "=" else f"--{key}" for key, sign, value in flags]
    values = [[str(value)] if sign == " " else [] for _, sign, value in flags]
    argv = [part for word, more in zip(words, values, strict=True) for part in (word, *more)]
    accepted([*(word for word in argv if word not in ("-h", "--help")), *model])


# ----------------------------------------------------------------------------------------------------------- replies

VLLM_REPLY = {
    "choices": [
        {
            "index": index,
            "finish_reason": "stop",
            "token_ids": [5, 6, 2],
            "token_logprobs": [-0.5, -1.0, 0.0],
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        }
        for index in range(2)
    ]
}
SGLANG_REPLY = [
    {
        "output_ids": [5, 6, 2],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None], [0.0, 2, None]],
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        },
    }
    for _ in range(2)
]
ODD = NUMBERS | JSON | st.sampled_from(["abort", "default", "4", "99999", "9" * 5000, "²", "", " ", [], {}, None])


@pytest.mark.parametrize(("client", "reply"), [(VllmClient, VLLM_REPLY), (SglangClient, SGLANG_REPLY)])
def test_any_reply(client, reply):
    """It is an error that names the server, or answers that can be trained on."""

    @fuzz(200, payload=mutated(reply, ODD).map(lambda said: json.dumps(said).encode()) | st.binary(max_size=40))
    def check(payload):
        engine = client("http://a:1", None, 10.0, lambda: 3)

        async def post(*_: Any, **__: Any) -> bytes:
            return payload

        engine._post = post
        try:
            answers = asyncio.run(engine.generate([1, 2], SamplingParams(2, 1.0, 3), "r"))
        except (EngineError, UserError) as error:
            assert "http://a:1" in str(error)
            return
        assert len(answers) == 2
        for answer in answers:
            assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) <= 3
            assert all(0 <= token < 2**31 for token in answer.token_ids)
            assert all(math.isfinite(logprob) and logprob < 0.1 for logprob in answer.logprobs)
            assert all(type(version) is int for version in answer.versions)
            assert answer.finish_reason in get_args(FinishReason)

    check()


# -------------------------------------------------------------------------------------------------------------- rows

ROW = {"question": [{"role": "user", "content": "1+1="}], "answer": "2", "more": [1, {"a": None}]}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY_QWEN3))


@fuzz(
    200,
    lines=st.lists(mutated(ROW, ODD).map(lambda row: json.dumps(row).encode()), min_size=1, max_size=2)
    | st.lists(st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()), max_size=4),
    chat=st.booleans(),
    pattern=st.sampled_from(["", "(.+)", "(x)?"]),
)
def test_any_rows(tmp_path, tokenizer, lines, chat, pattern):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    data = Data(source="jsonl", path=str(path), chat_template=chat, answer_pattern=pattern)
    try:
        prompts = PromptSource(data, tokenizer, 0).next(3)
    except UserError as error:
        assert str(error)
        return
    for prompt in prompts:
        assert prompt.token_ids and isinstance(prompt.answer, str)
        json.dumps(prompt.columns)


# ----------------------------------------------------------------------------------------------------------- buckets

SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.text(max_size=20),
        st.sampled_from(sorted(WIRE_DTYPES.values(), key=str)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@fuzz(100, specs=SPECS, limit=st.integers(1, 600), version=st.integers(0, 2**62), flip=st.integers(0, 10**6))
def test_any_plan(specs, limit, version, flip):
    """What is packed by a plan is read by its JSON. Any changed bit of payload or trailer is refused."""
    plan = json.loads(json.dumps(plan_to_json(plan_buckets(specs, limit))))
    info = {
        "protocol": PROTOCOL,
        "backend": "disk",
        "master_address": "",
        "master_port": 0,
        "rank_offset": 0,
        "run": "r",
    }
    info |= {"world_size": 1, "num_buffers": 1, "timeout_seconds": 1.0, "plan": plan}
    receiver = Receiver(info, torch.device("cpu"))
    assert [spec for bucket in receiver.buckets for spec in bucket.tensors] == specs
    for bucket in receiver.buckets:
        wire = torch.randint(0, 256, (bucket.wire_bytes,), dtype=torch.uint8)
        payload = wire[: bucket.payload_bytes]
        checksum = Checksum(payload.device, bucket.payload_bytes)(payload).item()
        bucket.trailer(wire).copy_(torch.tensor([version, bucket.index, bucket.payload_bytes, checksum]))
        assert receiver._verify(bucket, wire, version) == checksum
        for spec, offset, (name, view) in zip(bucket.tensors, bucket.offsets, bucket.views(wire), strict=True):
            assert (name, view.dtype, tuple(view.shape)) == (spec.name, spec.dtype, spec.shape)
            assert view.numel() == 0 or view.data_ptr() == wire.data_ptr() + offset
        wire[flip % bucket.wire_bytes] ^= 1 << flip % 8
        with pytest.raises(ValueError, match="refused"):
            receiver._verify(bucket, wire, version)


PLAN = plan_to_json(plan_buckets([TensorSpec("a", torch.float32, (3, 5)), TensorSpec("b", torch.bfloat16, (7,))], 99))


@fuzz(150, plan=mutated(PLAN, JSON | NUMBERS))
def test_any_plan_that_is_not_ours(plan):
    try:
        buckets = plan_from_json(plan)
    except (ValueError, TypeError, OverflowError):  # the server refuses it
        return
    assert plan_from_json(plan_to_json(buckets)) == buckets


# ----------------------------------------------------------------------------------------------------------- answers

MATH = st.lists(
    st.sampled_from(
        [
            "1",
            "0",
            "23",
            ".5",
            ",",
            "-",
            "+",
            "/",
            "e9",
            "e999999999",
            "$",
            "\\boxed{",
            "\\frac{",
            "}",
            "{",
            "\\sqrt",
            "x",
        ]
    )
    | st.sampled_from([" ", "=", "(", ")", "^", "\n", "\\pi", "\\", "%", "answer is", "\\(", "\\]", "!", "٣", "²"])
    | st.text(max_size=3),
    max_size=12,
).map("".join)


@fuzz(300, answer=MATH | st.text(), reference=MATH)
def test_any_answer_to_numeric_and_exact_match(answer, reference):
    prompt = Prompt(0, [1], "?", reference)
    for function in (exact_match, numeric_match):
        try:
            itself = function(reference, prompt)
        except ValueError as error:  # the reference is none
            assert "reference" in str(error)
            continue
        assert itself == 1.0
        assert function(answer, prompt) in (0.0, 1.0)
        assert function(answer, prompt) == function(f" {answer} ", prompt)


@fuzz(60, answer=MATH, reference=st.sampled_from(["42", "\\frac{1}{2}", "2\\sqrt{3}", "x+1", "(1, 2)"]))
def test_any_answer_to_math_verify(answer, reference):
    errors = pytest.importorskip("math_verify.errors")
    with contextlib.suppress(errors.TimeoutException):  # named, and ends after 5 s
        assert math_verify(answer, Prompt(0, [1], "?", reference)) in (0.0, 1.0)
