"""A whole run with an environment of several turns, the calculator, and with others for its held-out sets."""

import json
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import BACKGROUND, arguments, attempt, embedded_url, environment, steps, train
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.environments.calculator import CALL, MAX_CALLS, calculate
from torchtitan.grpo.rollouts.environment import RolloutClient, Turns

CALCULATOR = {
    "--job.config_file": "train_configs/calculator.toml",
    "--training.steps": "2",
    "--sft.steps": "40",
    "--metrics.samples_per_step": "1000",
    "--data.source_args": '{"operators": ["*"], "max": 99, "size": 500}',
}
SETS = """
[[validation.sets]]
name = "usual"

[[validation.sets]]
name = "alone"
environment = "none"

[[validation.sets]]
name = "told"
source = "environment"
environment = "tests.integration.test_environment:Told"
environment_args = { says = "=12" }
samples_per_prompt = 2
"""


class Told:
    """Writes something into the middle of each answer to its own question."""

    def __init__(self, says: str) -> None:
        self.says = says
        self.rows = [{"question": "3*4=", "answer": "12"}]

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        turns = [Turns(prompt) for _ in range(client.params.n)]
        for each in turns:
            each.sampled((await client.generate(each.token_ids, max_tokens=3))[0])
            each.given(client.tokenizer(self.says, add_special_tokens=False)["input_ids"])
            each.sampled((await client.generate(each.token_ids, max_tokens=3))[0])
        return [each.sample() for each in turns]


@pytest.fixture(scope="module")
def with_sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """The folder and the flags of a run whose held-out sets differ in their environments."""
    folder = tmp_path_factory.mktemp("sets")
    config = folder / "sets.toml"
    config.write_text((ROOT / "train_configs" / "calculator.toml").read_text() + SETS)
    flags = CALCULATOR | {"--job.config_file": str(config), "--grpo.zero_variance_groups": "keep"}
    train(folder / "run", flags)
    return folder / "run", flags


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


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("max_age", [0, 1], ids=["sync", "async"])
def test_results_are_read_by_the_model_and_not_trained_on(max_age, with_sets, tmp_path):
    folder = tmp_path if max_age else with_sets[0]
    if max_age:
        train(folder, CALCULATOR | {"--grpo.zero_variance_groups": "keep"} | BACKGROUND)
    lines, samples = steps(folder), json_lines(folder / "samples.jsonl")
    assert len(lines) == 2 and len(samples) == 2 * 8 * 4
    in_all = 0
    for line in lines:
        own = [sample for sample in samples if sample["step"] == line["step"]]
        in_all += sum(given_characters(sample) for sample in own)
        assert line["rollout/answer_tokens"] == sum(sample["answer_tokens"] for sample in own)
        assert line["train/answer_tokens"] == line["rollout/answer_tokens"]
        oldest = max(0, line["step"] - 1 - max_age)
        assert line["rollout/age_max"] <= line["step"] - 1 - oldest
        assert all(oldest <= version < line["step"] for sample in own for version in sample["versions"])
        if line["rollout/age_max"] == 0:
            assert line["policy/mismatch_abs"] <= 1e-4, "trainer and server read the same text"
    assert in_all > 0, "some answers have a call"


def test_held_out_sets_have_their_own_environments_also_in_an_evaluation(with_sets, tmp_path):
    folder, flags = with_sets
    records = [record for record in json_lines(folder / "validation_samples.jsonl") if record["step"] == 2]
    usual, alone, told = ([r for r in records if r["source"] == name] for name in ("usual", "alone", "told"))
    assert [len(usual), len(alone), len(told)] == [8 * (1 + 4), 8 * (1 + 4), 1 + 2]
    assert [record["prompt"] for record in usual] == [record["prompt"] for record in alone]
    spans = [record["answer"][first:end] for record in usual for first, end in record["given"]]
    assert sum(map(len, spans)) == sum(map(given_characters, usual)) > 0, "the calculator's, as in training"
    assert [record["given"] for record in alone] == [[]] * len(alone), "one turn"
    assert any(">" in record["answer"] for record in alone), "nobody answers a call"
    for record in told:
        [(first, end)] = record["given"]
        assert record["answer"][first:end] == "=12" and record["prompt"] == "3*4="
        assert record["answer_tokens"] == 3 + 3 or record["finish_reason"] == "stop"

    words = [folder / "checkpoint" / "step-2", *arguments(folder, flags), "--out", tmp_path / "evaluation"]
    log = tmp_path / "log"
    Ranks(1, "torchtitan.grpo.commands", "evaluate", *words, log=log, environment=environment(), found=False).check()
    answers = json_lines(tmp_path / "evaluation" / "answers.jsonl")
    same = ("kind", "prompt", "answer", "reward", "answer_tokens")
    assert [(a["set"], *(a[name] for name in same)) for a in answers] == [
        (record["source"], *(record[name] for name in same))
        for kind_of_set in (usual, alone, told)
        for record in kind_of_set
    ]
    result = json.loads((tmp_path / "evaluation" / "result.json").read_text())["sets"]
    line = steps(folder)[-1]
    for name, of_set in result.items():
        for metric, estimate in of_set["metrics"].items():
            assert estimate["mean"] == line[f"validation/{name}/{metric}"], (name, metric)


def test_an_environment_that_always_fails_ends_the_run_with_a_prompts_index_and_the_place(tmp_path):
    flags = {"--sft.steps": "1", "--rollout.environment": "tests.integration.test_environment:broken"}
    status, said = attempt(tmp_path, CALCULATOR | flags | {"--rollout.urls": embedded_url()})
    assert status != 0
    assert '"tests.integration.test_environment:broken" failed on ' in said
    assert "for example on prompt " in said and "it raised RuntimeError: no tool today (" in said
    assert "test_environment.py:" in said and "in broken)" in said


async def broken(client, prompt):
    raise RuntimeError("no tool today")
