"""What an environment gets and gives: its client, samples of several turns, and how they are checked."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.data.group_arrays import from_bytes, to_bytes
from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.samples import Prompt, Sample, TopTokens
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.environment import RolloutClient, Turns, checked, single_turn

PROMPT = Prompt(7, [3, 4, 5], "a prompt")
PARAMS = SamplingParams(n=4, temperature=0.7, max_tokens=10, stop_token_ids=(2,), seed=100)


def check(samples: list[Sample], max_tokens: int, oldest: int = -1, prompt: Prompt = PROMPT, **params) -> list[Sample]:
    return checked(samples, "m:f", prompt, replace(PARAMS, max_tokens=max_tokens, **params), oldest)


class Asked:
    """The other end of a `RolloutClient`: notes what it is asked, and answers each with one token per call."""

    def __init__(self, params: SamplingParams = PARAMS) -> None:
        self.requests: list[tuple[list[int], SamplingParams, str]] = []
        tokenizer = load_tokenizer(str(TINY_QWEN3))
        self.client = RolloutClient(tokenizer, params, PROMPT, self.ask)

    async def ask(self, token_ids: list[int], params: SamplingParams, suffix: str, session: str) -> list[Completion]:
        self.requests.append((token_ids, params, suffix))
        number = len(self.requests)
        return [Completion([10 * number + i], [-0.5], "stop", [number]) for i in range(params.n)]

    def generate(self, *args, **kwargs) -> list[Completion]:
        return asyncio.run(self.client.generate(*args, **kwargs))


def test_a_single_turn_is_the_groups_own_request() -> None:
    asked = Asked()
    samples = asyncio.run(single_turn(asked.client, PROMPT))
    assert asked.requests == [([3, 4, 5], PARAMS, "")]
    assert samples == [Sample(PROMPT, [10 + i], [-0.5], [1], "stop", servers=[(0, "")]) for i in range(4)]


def test_calls_have_names_seeds_and_stop_tokens_of_their_own() -> None:
    asked = Asked()
    asked.generate([3, 4, 5], n=2)
    asked.generate([3, 4, 5, 10], stop_token_ids=(8, 9))
    asked.generate([3, 4, 5], seed=5)
    asked.generate([3, 4, 5])
    assert [suffix for _, _, suffix in asked.requests] == ["", "-turn1", "-turn2", "-turn3"]
    params = [params for _, params, _ in asked.requests]
    assert [p.n for p in params] == [2, 1, 1, 1]
    assert [p.seed for p in params] == [100, 104, 5, 112]
    assert [p.stop_token_ids for p in params] == [(2,), (2, 8, 9), (2,), (2,)]
    assert {p.temperature for p in params} == {0.7}


@pytest.mark.parametrize("stop", [("3!",), ["3!"], "3!"])
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(stop) -> None:
    asked = Asked(replace(PARAMS, stop=("</answer>",)))
    tokenizer = asked.client.tokenizer
    written = tokenizer("12=3!and more", add_special_tokens=False)["input_ids"]

    async def ask(token_ids: list[int], params: SamplingParams, suffix: str, session: str) -> list[Completion]:
        assert params.stop == ("</answer>", "3!")
        return [Completion(list(written), [-1.0] * len(written), "length", [1] * len(written), "http://a")]

    client = RolloutClient(tokenizer, asked.client.params, PROMPT, ask)
    [completion] = asyncio.run(client.generate([3, 4, 5], stop=stop))
    assert tokenizer.decode(completion.token_ids) == "12=3!"
    assert (len(completion.logprobs), len(completion.versions), completion.finish_reason) == (5, 5, "stop")
    assert completion.server == "http://a"


def test_calls_at_once_have_names_of_their_own() -> None:
    async def both(client: RolloutClient) -> None:
        await asyncio.gather(*[client.generate([3, 4, 5]) for _ in range(3)])

    asked = Asked()
    asyncio.run(both(asked.client))
    assert len({suffix for _, _, suffix in asked.requests}) == len({p.seed for _, p, _ in asked.requests}) == 3


@pytest.mark.parametrize("group", [1, 4], ids=["per_sample", "group"])
def test_no_two_answers_of_any_calls_have_the_same_seed(group) -> None:
    """Servers add an answer's number to the seed of its request."""
    asked = Asked(replace(PARAMS, n=group))
    for n in (1, 8, 3, 1, 2):
        asked.generate([3, 4, 5], n=n)
    seeds = [params.seed + number for _, params, _ in asked.requests for number in range(params.n)]
    assert len(set(seeds)) == len(seeds) == 15


def test_without_a_seed_none_is_made_up() -> None:
    asked = Asked(SamplingParams(n=4, temperature=1.0, max_tokens=10))
    asked.generate([3, 4, 5])
    asked.generate([3, 4, 5])
    assert [params.seed for _, params, _ in asked.requests] == [None, None]


@pytest.mark.parametrize(("answer", "wished", "asked_for"), [(0, None, 10), (4, None, 6), (4, 3, 3), (4, 99, 6)])
def test_turns_share_the_length_of_an_answer(answer: int, wished: int | None, asked_for: int) -> None:
    asked = Asked()
    asked.generate([3, 4, 5] + [9] * answer, max_tokens=wished)
    assert asked.requests[0][1].max_tokens == asked_for


@pytest.mark.parametrize(("answer", "wished"), [(10, None), (12, None), (10, 5), (0, 0)])
def test_a_full_answer_is_continued_by_nothing(answer: int, wished: int | None) -> None:
    asked = Asked()
    completions = asked.generate([3, 4, 5] + [9] * answer, n=3, max_tokens=wished)
    assert completions == [Completion([], [], "length", [])] * 3
    assert asked.requests == []


def test_turns_keep_tokens_versions_and_who_said_them() -> None:
    turns = Turns(PROMPT)
    assert turns.token_ids == [3, 4, 5]
    turns.sampled(Completion([10, 11], [-0.1, -0.2], "stop", [6, 7], "http://a"))
    assert turns.token_ids == [3, 4, 5, 10, 11]
    turns.given([20, 21, 22])
    turns.sampled(Completion([12], [-0.3], "length", [8], "http://b"))
    turns.given([])
    sample = turns.sample()
    assert check([sample], 6) == [
        Sample(
            PROMPT,
            [10, 11, 20, 21, 22, 12],
            [-0.1, -0.2, 0.0, 0.0, 0.0, -0.3],
            [6, 7, 7, 7, 7, 8],
            "length",
            [True, True, False, False, False, True],
            servers=[(0, "http://a"), (5, "http://b")],
        )
    ]
    assert sample.sampled_tokens == 3
    assert PROMPT.token_ids == [3, 4, 5], "the prompt is everyone's"


def test_turns_know_what_was_kept_in_place_of_each_sampled_token() -> None:
    turns = Turns(PROMPT)
    turns.given([4])
    for ids in ([5, 6], [7]):
        kept = KeptTokens.of([[token, 90, 91] for token in ids], ids, 100)
        turns.sampled(Completion(ids, [-0.5] * len(ids), "stop", [3] * len(ids), kept=kept))
        turns.given([8, 9])
    sample = turns.sample()
    assert sample.kept.counts.tolist() == [0, 3, 3, 0, 0, 3, 0, 0]
    assert sample.kept.ids.tolist() == [5, 90, 91, 6, 90, 91, 7, 90, 91]
    for wrong in (None, sample.kept.first(7)):
        with pytest.raises(UserError, match=r"'m:f': a sample of 8 tokens says of [07] which tokens were .*`Turns`"):
            check([replace(sample, kept=wrong)], 99, kept=True)
    (cut,) = check([sample], 3, kept=True)
    assert cut.token_ids == [4, 5, 6] and cut.kept.ids.tolist() == [5, 90, 91, 6, 90, 91]
    assert check([Sample(PROMPT, [], [], [], "abort")], 3, kept=True), "nothing is trained"


def test_turns_keep_the_likeliest_tokens_of_what_was_sampled() -> None:
    turns, told = Turns(PROMPT), TopTokens(np.array([[8, 1], [9, 2]], np.int32), np.full((2, 2), -0.75, np.float32))
    turns.given([6])
    turns.sampled(Completion([8, 9], [-0.5] * 2, "stop", [1, 1], top=told))
    turns.given([6])
    turns.sampled(Completion([1], [-0.5], "stop", [1], top=told.cut(1)))
    [sample] = check([turns.sample()], 4, top_tokens=2)
    assert sample.token_ids == [6, 8, 9, 6]
    assert sample.top.ids.tolist() == [[-1, -1], [8, 1], [9, 2], [-1, -1]]
    assert np.exp(sample.top.logprobs).sum(1) == pytest.approx([0, 2 * np.exp(-0.75), 2 * np.exp(-0.75), 0])
    only_given = Turns(PROMPT)
    only_given.given([6])
    check([only_given.sample()], 4, top_tokens=2)
    for top in (None, told):
        made = Sample(PROMPT, [5], [-0.5], [1], "stop", top=top)
        with pytest.raises(UserError, match=r"2 likeliest tokens .*score_centering needs: make samples with `Turns`"):
            check([made], 4, top_tokens=2)


def test_a_text_is_no_turn() -> None:
    turns = Turns(PROMPT)
    with pytest.raises(TypeError, match="token ids, not a text: client"):
        turns.given("high")
    assert turns.token_ids == PROMPT.token_ids


def test_what_an_environment_says_first_is_not_trained_on() -> None:
    turns = Turns(PROMPT)
    turns.given([20])
    turns.sampled(Completion([10], [-0.1], "stop", [6]))
    assert turns.sample().loss_mask == [False, True]
    assert turns.sample().finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "prompt", "ends"),
    [
        *[(4, 2, "stop"), (5, 2, "length"), (3, 4, "length"), (2, 4, "stop"), (0, 7, "length"), (5, 1, "length")],
        *[(5, 4, "length"), (4, 9, "length")],
    ],
)
def test_a_sample_is_cut_by_the_answers_limit_and_not_by_a_turns(tokens: int, prompt: int, ends: str) -> None:
    """The group's prompt has two tokens, and an answer five. What a sample's own prompt adds counts, too."""
    sample = Sample(Prompt(0, [1] * prompt, "", ""), [3] * tokens, [0.0] * tokens, [0] * tokens, "length")
    [cut] = check([sample], 5, prompt=Prompt(0, [1, 1], ""))
    assert (cut.finish_reason, len(cut.token_ids)) == (ends, min(tokens, 5, max(0, 7 - prompt))), "a row has room for 7"


def test_answers_over_the_limit_are_cut_in_every_column() -> None:
    masked = Sample(PROMPT, [1, 2, 3], [0.1, 0.2, 0.3], [1, 1, 2], "stop", [True, False, True])
    plain = Sample(PROMPT, [1, 2, 3], [0.1, 0.2, 0.3], [1, 1, 2], "stop")
    short = Sample(PROMPT, [1, 2], [0.1, 0.2], [1, 1], "stop")
    group = check([masked, plain, short], 2)
    assert group == [
        Sample(PROMPT, [1, 2], [0.1, 0.2], [1, 1], "length", [True, False]),
        Sample(PROMPT, [1, 2], [0.1, 0.2], [1, 1], "length"),
        Sample(PROMPT, [1, 2], [0.1, 0.2], [1, 1], "stop"),
    ]


@pytest.mark.parametrize("returned", [None, "text", (), [PROMPT], [None], {"samples": []}])
def test_what_is_no_group_is_refused(returned: object) -> None:
    with pytest.raises(UserError, match=r"\[rollout\] environment = 'm:f' must return a list of one Sample or more"):
        check(returned, 10)


@pytest.mark.parametrize("column", ["logprobs", "versions", "loss_mask"])
def test_columns_of_another_length_are_refused(column: str) -> None:
    sample = Sample(PROMPT, [1, 2], [0.1, 0.2], [1, 1], "stop", [True, True])
    getattr(sample, column).append(0)
    with pytest.raises(UserError, match=r"environment = 'm:f': a sample of 2 tokens has \[.*3.*\]"):
        check([sample], 10)


def test_tokens_from_before_the_group_are_refused() -> None:
    sample = Sample(PROMPT, [1, 2], [0.1, 0.2], [3, 4], "stop", [False, True])
    assert check([sample], 10, 4) == [sample]
    with pytest.raises(UserError, match=r"'m:f': a sample has a token of weight version 4, and its group began at 5"):
        check([sample], 10, 5)


@pytest.mark.parametrize("reward", ["1", [1.0]])
def test_rewards_of_another_type_are_refused(reward: object) -> None:
    for fields in ({"reward": reward}, {"rewards": {"tests_passed": reward}}):
        with pytest.raises(UserError, match=r"environment = 'm:f': (reward|tests_passed) = .* is no number"):
            check([Sample(PROMPT, [1], [0.1], [1], "stop", **fields)], 10)


def test_a_field_that_is_no_text_is_named_without_the_others() -> None:
    long = replace(PROMPT, text="word " * 40_000)
    servers = [(0, "http://a")] * 12
    for prompt, finish_reason, said in ((long, None, "None"), (replace(long, answer=72), "stop", "72")):
        with pytest.raises(UserError, match=f"must be texts, not {said}$") as raised:
            check([Sample(prompt, [1], [0.1], [1], finish_reason, servers=servers)], 10)
        assert len(str(raised.value)) < 300


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_what_an_episode_may_cause_costs_no_more_than_itself(bad: float) -> None:
    def sample(**fields: object) -> Sample:
        return Sample(PROMPT, [1], [0.1], [1], "stop", **fields)

    [kept] = check([sample(reward=0.5, rewards={"seconds": bad, "tests_passed": 3})], 10)
    assert (kept.reward, kept.rewards) == (0.5, {"tests_passed": 3})
    over = Sample(PROMPT, [1, 60], [0.1, 0.0], [1, 1], "stop", [True, False])
    empty, unknown = (replace(sample(), prompt=Prompt(7, ids, "its own")) for ids in ([], [3, 61]))
    for samples, said in (
        *(([sample(reward=bad)], f"reward {bad!r}"), ([], "no sample"), ([over], "token 60")),
        *(([empty], "an empty prompt"), ([unknown], "token 61")),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) as raised:
            check(samples, 10, vocab_size=60)
        assert not isinstance(raised.value, UserError)


def test_a_reward_that_the_environment_gave_is_kept() -> None:
    sample = Sample(PROMPT, [1], [0.1], [1], "stop", rewards={"tests_passed": 3}, reward=0.5)
    assert check([sample], 10)[0].reward == 0.5


def test_arrays_become_lists_and_their_numbers_rewards() -> None:
    sample = Sample(PROMPT, [1, 2], np.array([-0.5, -1.0]), [4, 4], "stop", loss_mask=np.array([True, False]))
    sample.reward, sample.rewards = np.float32(0.5), {"tests_passed": np.int64(3), "share": np.float32(0.25)}
    (found,) = check([sample], 10)
    assert from_bytes(to_bytes([found])) == [found]
    assert (found.logprobs, found.loss_mask) == ([-0.5, -1.0], [True, False])
    assert (found.reward, found.rewards) == (0.5, {"tests_passed": 3, "share": 0.25})


def test_a_long_prompt_of_a_group_is_not_read_for_each_sample() -> None:
    class Unread(list):
        def __iter__(self):
            raise AssertionError("the event loop stands still meanwhile")

    prompt = Prompt(7, Unread([3, 4, 5]), "long")
    assert len(check([Sample(prompt, [1], [0.1], [1], "stop") for _ in range(2)], 10, prompt=prompt)) == 2
