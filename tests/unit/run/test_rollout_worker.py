"""What the worker of a rollout process does without servers."""

import json
from types import SimpleNamespace

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data, JobConfig, Sft
from torchtitan.grpo.data.held_out import HeldOut
from torchtitan.grpo.data.prompts import PromptSource, sft_pairs
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.run.rollout_worker import RolloutWorker
from torchtitan.grpo.run.rollouts import Rollouts


@pytest.mark.parametrize(("drafts", "blank"), [(["1", None, "", float("nan")], 3), (["1", 2], 0)])
def test_targets_of_the_warm_start_that_say_nothing_are_counted(tmp_path, caplog, drafts, blank):
    rows = [{"question": f"{i}", "answer": "1", "draft": draft} for i, draft in enumerate(drafts)]
    tokenizer = load_tokenizer(str(TINY_QWEN3))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Data(source="jsonl", path=str(tmp_path / "rows.jsonl"))
    prompts = PromptSource(data, tokenizer, 0)
    worker = SimpleNamespace(
        config=SimpleNamespace(data=data, sft=Sft(steps=9, batch_size=2)),
        prompts=prompts,
        _pairs=lambda prompts: sft_pairs(prompts, data, "draft", tokenizer),
    )
    before = prompts.state_dict()
    RolloutWorker.check_pairs(worker)
    assert prompts.state_dict() == before
    assert (f"say nothing on {blank} rows" in caplog.text) == bool(blank)


def test_one_validation_in_an_outage_is_left_out_and_the_first_or_a_second_one_ends_the_run(caplog):
    prompt, works = Prompt(3, [1], "?"), iter([False, True, False, True, False, False])

    def collect_all(asks, alone):
        reward = {"reward": 1.0, "rewards": {"right": 1.0}} if next(works) else {"reward_failures": {"tool": "is away"}}
        return [[[Sample(prompt, [5], [-0.5], [2], "stop", **reward)] for _ in ask.prompts] for ask in asks]

    def call(verb, *arguments):
        """As of processes that each take the place of the one before."""
        worker = SimpleNamespace(
            config=JobConfig(),
            collector=SimpleNamespace(collect_all=collect_all, rewards=SimpleNamespace(find_finals=lambda samples: 0)),
            held_out=[HeldOut("", [prompt], 1, 1.0, 8)],
            samples=SimpleNamespace(log_validation=lambda *_: None),
            _sampling=lambda n, temperature: SamplingParams(n, temperature, 8),
        )
        return getattr(RolloutWorker, verb)(worker, *arguments), []

    rollouts = object.__new__(Rollouts)
    rollouts._first, rollouts._validation_worked = SimpleNamespace(call=call), False
    failed = pytest.raises(UserError, match=r'2 of 2 answers have no reward.*"tool" failed on 2.*it is away')
    with failed:
        rollouts.validate(0)
    for step in (1, 3):
        assert rollouts.validate(step)["validation/greedy_reward"] == 1.0
        if step == 1:
            assert rollouts.validate(2) == {}
    assert "Step 2 has no validation: 2 of 2 answers have no reward" in caplog.text
    assert rollouts.validate(4) == {}
    with failed:
        rollouts.validate(5)
