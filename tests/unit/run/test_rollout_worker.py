"""What the worker of a rollout process does without servers."""

import json
from types import SimpleNamespace

import pytest

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.job_config import Data, Sft
from torchtitan.grpo.data.prompts import PromptSource, sft_pairs
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.run.rollout_worker import RolloutWorker


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
