"""A whole run with an environment of several turns: the calculator, on the embedded server."""

import json

import pytest

from tests.helpers.trainer_runs import BACKGROUND, attempt, embedded_url, train
from torchtitan.grpo.environments.calculator import CALL, MAX_CALLS, calculate

CALCULATOR = {
    "--job.config_file": "train_configs/calculator.toml",
    "--training.steps": "2",
    "--sft.steps": "60",
    "--metrics.samples_per_step": "1000",
}


def given_characters(sample: dict) -> int:
    """How much of an answer the calculator wrote, which must be what its calls come to."""
    answer, given, at = sample["answer"], 0, 0
    for _ in range(MAX_CALLS):
        turn = answer[at:].partition(">")[0] + ">"
        at += len(turn)
        call = CALL.search(turn)
        if call and at <= len(answer):
            result = calculate(call[1]) + "\n"
            written = answer[at : at + len(result)]
            cut = sample["finish_reason"] == "length"
            assert result.startswith(written) if cut else written == result, sample
            given += len(written)
            at += len(written)
    return given


@pytest.mark.parametrize(("flags", "max_age"), [({}, 0), (BACKGROUND, 1)], ids=["sync", "async"])
def test_results_are_read_by_the_model_and_not_trained_on(flags, max_age, tmp_path):
    lines = train(tmp_path, CALCULATOR | {"--grpo.zero_variance_groups": "keep"} | flags)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and len(samples) == 2 * 8 * 4
    for line in lines:
        own = [sample for sample in samples if sample["step"] == line["step"]]
        given = sum(given_characters(sample) for sample in own)  # every character is a token
        assert given > 0, "some answers have a call"
        assert line["rollout/answer_tokens"] == sum(sample["answer_tokens"] for sample in own) - given
        assert line["train/answer_tokens"] == line["rollout/answer_tokens"]
        oldest = max(0, line["step"] - 1 - max_age)
        assert line["rollout/age_max"] <= line["step"] - 1 - oldest
        assert all(oldest <= version < line["step"] for sample in own for version in sample["versions"])
        if line["rollout/age_max"] == 0:
            assert line["policy/mismatch_abs"] <= 1e-4, "trainer and server read the same text"


def test_an_environment_that_always_fails_ends_the_run_with_a_prompts_index_and_the_place(tmp_path):
    flags = {"--sft.steps": "1", "--rollout.environment": "tests.integration.test_environment:broken"}
    status, said = attempt(tmp_path, CALCULATOR | flags | {"--rollout.urls": embedded_url()})
    assert status != 0
    assert '"tests.integration.test_environment:broken" failed on ' in said
    assert "for example on prompt " in said and "it raised RuntimeError: no tool today (" in said
    assert "test_environment.py:" in said and "in broken)" in said


async def broken(client, prompt):
    raise RuntimeError("no tool today")
