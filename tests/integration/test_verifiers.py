"""Environments of the package `verifiers`: one turn, a tool, several turns, and one that fails."""

import asyncio
import functools
import json
import os
import random
import subprocess
import time
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import ROOT, TINY_QWEN3
from tests.helpers.endpoint_runs import CHATML
from tests.helpers.openenv_server import served_real
from tests.helpers.trainer_runs import train
from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.samples import Group, Prompt
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.endpoint.chat import Chat
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.environment import RolloutClient
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.guarded_environment import GuardedEnvironment

TASKS = "tests.helpers.verifiers_tasks"
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=60, stop_token_ids=(2,), seed=1)


@pytest.fixture(scope="module", autouse=True)
def verifiers_is_there() -> None:
    """Imported here, and not where each process of the tests collects all of them: that takes seven seconds."""
    global TASKSETS, Conversation, ProviderError, Traced, VerifiersEnvironment, served
    pytest.importorskip("verifiers", reason='needs verifiers: pip install "verifiers>=0.4,<0.5"')
    from verifiers.v1.errors import ProviderError

    from tests.helpers.verifiers_tasks.four import TASKSETS
    from tests.helpers.verifiers_tasks.lookup import served
    from tests.helpers.verifiers_tasks.traced import Traced
    from torchtitan.grpo.environments.verifiers_client import Conversation
    from torchtitan.grpo.environments.verifiers_v1 import VerifiersEnvironment


def children() -> set[int]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
    return set(map(int, found.stdout.split()))


class Sampler:
    """Answers with random tokens, and keeps what it is asked and what it says."""

    params = PARAMS

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(str(TINY_QWEN3))
        self.calls: list[tuple[list[int], Completion]] = []
        self._random = random.Random(0)

    async def ask(self, token_ids: list[int], params: SamplingParams, suffix: str, session: str) -> list[Completion]:
        said = [self._random.randrange(4, 60) for _ in range(self._random.randrange(1, 5))] + [2]
        said = said[: params.max_tokens]
        completion = Completion(said, [-float(token) for token in said], "stop", [3 + len(self.calls)] * len(said))
        self.calls.append((token_ids, completion))
        return [completion]

    def groups(self, environment: "VerifiersEnvironment", prompts: list[Prompt], limit_s: float) -> list[Group]:
        guarded = GuardedEnvironment(environment, "verifiers:tests")

        async def all_of_them() -> list[Group]:
            def one(prompt: Prompt):
                make = lambda params, name, start: RolloutClient(self.tokenizer, params, prompt, self.ask)  # noqa: E731
                return guarded.group(make, prompt, self.params, GroupCall(timeout_s=limit_s))

            return [await one(prompt) for prompt in prompts]

        return asyncio.run(all_of_them())

    def prompts(self, environment: "VerifiersEnvironment", count: int) -> list[Prompt]:
        data = Data(source="environment", shuffle=False)
        return PromptSource(data, self.tokenizer, 0, of_environment=environment.rows).next(count)


class Scripted(Sampler):
    """Says a conversation's turns one after the other, with a token for each byte."""

    def __init__(self, turns: list[str], max_tokens: int) -> None:
        super().__init__()
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        letter_by_letter = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
        letter_by_letter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        letter_by_letter.decoder = decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=letter_by_letter, eos_token="<eos>", chat_template=CHATML
        )
        self.params = replace(PARAMS, max_tokens=max_tokens)
        self.turns = [f"{turn}<eos>" for turn in turns]

    async def ask(self, token_ids: list[int], params: SamplingParams, suffix: str, session: str) -> list[Completion]:
        turn = int(suffix.removeprefix("-turn") or 0)
        said = self.tokenizer(self.turns[turn])["input_ids"]
        assert len(said) <= params.max_tokens
        return [Completion(said, [-float(token) for token in said], "stop", [turn] * len(said))]


@pytest.mark.parametrize("kind", ["sums", "guess"])
def test_samples_are_what_verifiers_traced_to_the_last_token(kind: str) -> None:
    sampler, environment = Sampler(), Traced(f"{TASKS}.{kind}", {}, select={"limit": 3})
    try:
        groups = sampler.groups(environment, sampler.prompts(environment, 3), 30.0)
    finally:
        environment.close()
    samples = [sample for group in groups for sample in group]
    traces = {tuple(trace.branches[0].token_ids): trace for e in environment.episodes for trace in e.traces}
    assert len(samples) == len(traces) == 6
    for sample in samples:
        begin = sample.prompt.token_ids
        trace = traces[(*begin, *sample.token_ids)]
        [branch] = trace.branches
        assert [False] * len(begin) + sample.loss_mask == branch.sampled_mask
        assert [0.0] * len(begin) + sample.logprobs == branch.logprobs
        assert sample.reward == trace.reward != 0.0 or kind == "sums"
        turns = 1 if kind == "sums" else 3
        assert len({v for v, own in zip(sample.versions, sample.loss_mask, strict=True) if own}) == turns
    said = [token for _, completion in sampler.calls for token in completion.token_ids]
    assert sum(sample.sampled_tokens for sample in samples) == len(said)
    if kind == "sums":
        assert {sample.rewards["characters"] for sample in samples} == {len(s.token_ids) - 1.0 for s in samples}


CALLS = [
    'well<tool_call>{"name": "letters_vowels", "arguments": {"text": "banana"}}</tool_call>'
    '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "letters_vowels", "arguments": [3]}</tool_call>',
    "aaa",
]


def test_the_harness_in_process_runs_the_tools_that_the_model_calls() -> None:
    conversation = Scripted(CALLS, 600)
    with served() as url:
        arguments = {"taskset": {"url": url}, "select": {"limit": 1}, "agent": {"harness": {"id": "in-process"}}}
        environment = Traced(f"{TASKS}.lookup", {}, **arguments)
        try:
            prompts = conversation.prompts(environment, 1)
            [samples] = conversation.groups(environment, prompts, 30.0)
            traces = [trace for episode in environment.episodes for trace in episode.traces]
            # What comes before the first turn, with the tools, counts against the budget, which then ends.
            tools = len(samples[0].prompt.token_ids) - len(prompts[0].token_ids)
            short = Scripted(CALLS, tools + samples[0].loss_mask.index(False))
            [short_samples] = short.groups(environment, prompts, 30.0)
        finally:
            environment.close()
    text, said = conversation.tokenizer.decode, [f"{turn}<eos>" for turn in CALLS]
    told = [
        "\nt:=3?<eos>\nt:error: unknown tool 'none'<eos>\na:",
        "\nt:error: the arguments are not a JSON object<eos>\na:",
    ]
    assert len(samples) == len(traces) == len(short_samples) == PARAMS.n
    for sample, trace in zip(samples, traces, strict=True):
        begin = text(sample.prompt.token_ids)
        assert begin.startswith("S[{") and "How many vowels a text has." in begin, "the model knows its tools"
        assert begin.endswith("u:vowels 0:<eos>\na:")
        runs = groupby(zip(sample.token_ids, sample.loss_mask, strict=True), key=itemgetter(1))
        parts = [(sampled, text([token for token, _ in run])) for sampled, run in runs]
        assert parts == [(True, said[0]), (False, told[0]), (True, said[1]), (False, told[1]), (True, said[2])]
        by_tools = ["=3?", "error: unknown tool 'none'", "error: the arguments are not a JSON object"]
        assert [message.content for message in trace.messages if message.role == "tool"] == by_tools
        assert sample.reward == trace.reward == 0.3, "of the last reply, three vowels"
    for sample in short_samples:
        assert text(sample.token_ids) == said[0] and sample.reward == 0.1, "of well"


def test_a_call_that_is_nested_too_deeply_is_refused() -> None:
    sampler, prompt = Sampler(), Prompt(0, [5], "1")
    tools = functools.reduce(lambda inner, _: [inner], range(980), [])
    body = {"messages": [{"role": "user", "content": "1"}], "tools": [tools]}

    async def asked() -> None:
        client = RolloutClient(sampler.tokenizer, PARAMS, prompt, sampler.ask)
        conversation = Conversation(client, prompt, Chat(sampler.tokenizer), asyncio.get_running_loop())
        with pytest.raises(ProviderError) as refused:
            await conversation.answer("trace", body)
        assert refused.value.status_code == 400

    asyncio.run(asked())
    assert not sampler.calls


def test_a_task_that_fails_hangs_or_blocks_costs_its_own_samples() -> None:
    sampler, environment = Sampler(), VerifiersEnvironment(f"{TASKS}.broken", {})
    before = children()
    try:
        prompts = sampler.prompts(environment, 5)
        begin = time.monotonic()
        fine, raises, hangs, other, blocks = sampler.groups(environment, prompts, 1.0)
        assert time.monotonic() - begin < 20
    finally:
        environment.close()
    assert all(sample.reward is not None for sample in fine + other)
    for sample in raises:
        said = sample.reward_failures["verifiers:tests"]
        assert "no judge today" in said and "broken.py:" in said and "in judged" in said
    for sample in hangs + blocks:
        assert sample.reward_failures["verifiers:tests"] == "took longer than [rollout] group_timeout_seconds = 1"
    assert children() <= before


def test_what_cannot_be_stopped_leaves_no_thread(monkeypatch) -> None:
    async def fails(self: VerifiersEnvironment) -> None:
        raise RuntimeError("a tool's server does not end")

    environment = VerifiersEnvironment(f"{TASKS}.sums", {})
    monkeypatch.setattr(VerifiersEnvironment, "_stop", fails)
    with pytest.raises(RuntimeError, match="does not end"):
        environment.close()
    assert environment._thread.loop.is_closed()


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("no_such_taskset", {}, "no_such_taskset"),
        (f"{TASKS}.sums", {"taskset": {"smallest": 3}}, r"environment_args: taskset.smallest: "),
        (f"{TASKS}.sums", {"sandbox": 3}, r"environment_args: sandbox: "),
        (f"{TASKS}.sums", {"select": {"first": 3}}, r"environment_args: first: "),
    ],
)
def test_what_verifiers_does_not_know_is_refused(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf'environment = "verifiers:{name}".*{said}'):
        VerifiersEnvironment(name, {}, **arguments)


def test_a_run_trains_on_one_turn_on_tools_on_several_turns_and_on_openenv(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the tool's process finds its module
    flags = {
        "--training.steps": "2",
        "--sft.steps": "0",
        "--data.source": "environment",
        "--data.source_args": "{}",
        "--data.chat_template": None,
        "--data.max_prompt_tokens": "40",
        "--training.seq_len": "96",
        "--rollout.max_answer_tokens": "48",
        "--rollout.environment": f"{TASKS}.four:Four",
        "--rollout.environment_concurrency": "6",
        "--reward.functions": "",
        "--grpo.prompts_per_step": "4",
        "--grpo.zero_variance_groups": "keep",
        "--metrics.samples_per_step": "1000",
        "--validation.no-enable": None,
    }
    pytest.importorskip("openenv")
    with served_real(tmp_path / "openenv.log") as url:
        lines = train(tmp_path, flags | {"--rollout.environment_args": json.dumps({"limit": 1, "openenv": url})})
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and len(samples) == 2 * 4 * 4
    for line in lines:
        own = [sample for sample in samples if sample["step"] == line["step"]]
        assert len({sample["prompt"] for sample in own}) == len(TASKSETS) + 1
        assert line["reward/failures"] == line["rollout/groups_failed"] == 0
        assert {f"reward/{name}" for name in ("digits", "vowels", "near", "episode_steps")} <= line.keys()
        assert line["policy/mismatch_abs"] <= 1e-4, "trainer and server read the same tokens"
        assert line["train/answer_tokens"] == line["rollout/answer_tokens"]
        assert line["rollout/answer_tokens"] == sum(sample["answer_tokens"] for sample in own)
        assert any(sample["given"] for sample in own)
