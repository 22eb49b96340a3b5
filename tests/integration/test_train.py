"""The whole trainer with the embedded server: repeating, resuming, sharding, exporting."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import (
    BACKGROUND,
    environment,
    processes_of,
    small_run,
    steps,
    train,
    without_times,
)
from torchtitan.grpo.config.urls import PORTS


def test_a_seed_gives_the_same_run_again_and_a_resumed_run_goes_on_exactly(tmp_path):
    """In the second minibatch of a step the policy is no longer the sampler, and there is something to center."""
    schedule = {"--lr_scheduler.total_steps": "4"}  # the first part must not decay to its own end
    schedule |= {"--grpo.policy_loss": "cispo", "--grpo.minibatches": "2", "--grpo.proximal_logprobs": "sampler"}
    schedule |= {"--grpo.importance_correction": "none", "--grpo.score_centering": "8"}
    whole = train(tmp_path / "whole", schedule | {"--training.steps": "4"})
    train(tmp_path / "parts", schedule | {"--training.steps": "2"})
    train(tmp_path / "parts", schedule | {"--training.steps": "4", "--checkpoint.resume": None})
    resumed = steps(tmp_path / "parts")
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    # Steps 1 and 2 are a second run of the same seed, 3 and 4 come after the resume.
    validated = {name for line in whole + resumed for name in line if name.startswith("validation/")}
    plain = [[{k: v for k, v in s.items() if k not in validated} for s in without_times(r)] for r in (whole, resumed)]
    assert plain[0] == plain[1]
    assert [line["sync/pushes"] for line in resumed] == [1] * 4, "a resumed run's first weights are of no step"
    assert len({line["train/grad_norm"] for line in whole}) == 4
    assert min(line["policy/centering"] for line in whole) > 1e-4
    warmup = [8e-4 * step / 4 for step in (1, 2, 3, 4)]  # as long as the schedule
    assert [line["train/lr"] for line in whole] == pytest.approx(warmup)


def test_a_replay_of_the_record_is_the_run_again(tmp_path):
    flags = {"--training.steps": "4", "--checkpoint.interval": "2", "--lr_scheduler.total_steps": "4"}
    flags |= {"--rollout.stop": "="}
    run = train(tmp_path / "run", flags | {"--rollout.record_gib": "1"})

    def replay(name: str, *arguments: str, **changed: str) -> tuple[list[dict], str]:
        given = [part for flag in small_run(flags | changed).items() for part in flag if part is not None]
        command = [tmp_path / "run", "--out", tmp_path / name, *arguments, *given]
        process = Ranks(
            1, "torchtitan.grpo.commands", "replay", *command, log=tmp_path / f"{name}.log", environment=environment()
        )
        assert process.wait(120) == 0, process.log[-4000:]
        return without_times(steps(tmp_path / name)), process.log

    again, said = replay("again")
    served = ("rollout/groups_", "rollout/retried", "rollout/process_losses", "validation/", "checkpoint/", "data/")
    plain = [{k: v for k, v in line.items() if not k.startswith(served)} for line in without_times(run)]
    assert again == plain and len({line["train/grad_norm"] for line in again}) == 4
    assert "trained tokens" in said.splitlines()[-6]
    timed = [{key for key in line if key.startswith("time/")} for line in steps(tmp_path / "again")]
    assert all({"time/rollout_s", "time/pack_s", "time/train_s"} <= names for names in timed)
    assert [line.split()[0] for line in said.splitlines()[-5:]] == ["1", "2", "3", "4", "median"]

    # With a loss and a baseline of the user's own, which are the built-in ones. As of a run with Ray and keys.
    text = (ROOT / "train_configs" / "quickstart.toml").read_text() + "\n[ray]\nenable = true\nranks = 2\n"
    keys = f'serve_port = {PORTS[0]}\nserve_host = "0.0.0.0"\nserve_key_env = "NOT_HERE"\napi_key_env = "NOT_HERE"\n'
    text = text.replace("[rollout]\n", f"[rollout]\n{keys}")
    of_ray = tmp_path / "ray.toml"
    of_ray.write_text(text.replace("[reward]\n", '[reward]\nsecrets = ["NOT_HERE"]\n'))
    functions = {"policy_loss": "clipped", "advantage_baseline": "less_mean"}
    changed = {f"--grpo.{key}": f"tests.helpers.losses:{f}" for key, f in functions.items()}
    own, _ = replay("own", **changed, **{"--job.config_file": str(of_ray)})
    unsaid = ("policy/clipped", "policy/clip")
    told = [[{k: v for k, v in line.items() if not k.startswith(unsaid)} for line in run] for run in (own, again)]
    assert told[0] == told[1]

    # From the checkpoint in the middle, with another loss: the policy that step 3 begins with is the run's.
    other, _ = replay("other", "--after", "2", **{"--grpo.policy_loss": "cispo"})
    assert [line["step"] for line in other] == [3, 4]
    assert other[0]["policy/entropy"] == plain[2]["policy/entropy"]
    assert [line["train/loss"] for line in other] != [line["train/loss"] for line in plain[2:]]
    assert [line["reward/mean"] for line in other] == [line["reward/mean"] for line in plain[2:]]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without flags."""
    folder = tmp_path_factory.mktemp("usual") / "run"
    train(folder)
    return folder


def test_the_export_is_the_trained_model_and_mismatch_stays_under_1e_4(usual):
    lines = steps(usual)
    assert all(line["policy/mismatch_abs"] <= 1e-4 for line in lines)
    assert [line["sync/version"] for line in lines] == [1, 2, 3]
    model, loading = AutoModelForCausalLM.from_pretrained(
        usual / "checkpoint" / "step-3" / "hf", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert (usual / "checkpoint" / "step-3" / "hf" / "tokenizer.json").exists()
    assert model(torch.tensor([[1, 5, 6]])).logits.isfinite().all()


MIXTURE = """
[[data.mixture]]
name = "small"
weight = 3
source_args = { max = 9 }

[[data.mixture]]
name = "large"
source_args = { max = 39 }
functions = ["numeric_match"]

[[validation.sets]]
name = "small"
samples_per_prompt = 4

[[validation.sets]]
name = "products"
source_args = { operators = ["*"], max = 3 }
samples_per_prompt = 1
max_answer_tokens = 3
"""


def test_an_evaluation_of_the_checkpoint_gives_the_runs_own_numbers(tmp_path):
    config = tmp_path / "mixture.toml"
    text = (ROOT / "train_configs" / "quickstart.toml").read_text()
    config.write_text(text + MIXTURE)
    flags = {"--job.config_file": str(config), "--validation.prompts": "40", "--sft.steps": "80"}
    flags |= {"--reward.functions": "exact_match,numeric_match"}
    lines = train(tmp_path / "run", flags | {"--training.steps": "2"})
    assert all({"reward/small/mean", "reward/large/mean"} <= line.keys() for line in lines)
    assert [line["data/small/share"] for line in lines] == [0.75, 0.75]

    log, checkpoint = tmp_path / "log", tmp_path / "run/checkpoint/step-2"
    (tmp_path / "noisy.py").write_text("def score(answer, prompt):\n    print('judged')\n    return 1.0\n")
    own = environment() | {"FORKED_SERVERS": "1"}  # test_environment.py has an evaluation that starts its own
    own["PYTHONPATH"] = f"{tmp_path}:{own.get('PYTHONPATH', '')}"
    judged = "--reward.functions", "exact_match,numeric_match,noisy:score", "--reward.weights", "1,1,0"
    evaluation = Ranks(
        1, "torchtitan.grpo.commands", "evaluate", checkpoint, *judged, log=log, environment=own, found=False
    )
    evaluation.check()
    results = tmp_path / "run" / "evaluation" / "step-2"
    result = json.loads((results / "result.json").read_text())
    assert "judged" in (results / "rewards.log").read_text()
    of_run = {name: value for name, value in lines[-1].items() if name.startswith("validation/")}
    for of_set in ("small", "products"):
        metrics = result["sets"][of_set]["metrics"]
        noisy = [metrics.pop(f"{kind}_reward/noisy:score")["mean"] for kind in ("greedy", "sampled")]
        assert noisy == [1.0, 1.0] and "greedy_reward/exact_match" in metrics
        assert {name: each["mean"] for name, each in metrics.items()} == {
            name: of_run[f"validation/{of_set}/{name}"] for name in metrics
        }
        for name in ("greedy_reward", "sampled_reward"):
            assert metrics[name]["standard_error"] == of_run[f"validation/{of_set}/{name}_se"]
    assert 0 < of_run["validation/small/sampled_reward"] < 2, "equal numbers must not be those of a model without skill"
    assert of_run["validation/small/pass_at_1"] < of_run["validation/small/pass_at_4"]
    answers = [json.loads(line) for line in (results / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 40 * (1 + 4) + 16 * (1 + 1)
    assert max(answer["answer_tokens"] for answer in answers if answer["set"] == "products") <= 3
    assert "small" in evaluation.log and "majority_at_4" in evaluation.log and "version -1" not in evaluation.log
    assert processes_of(tmp_path) == [], "the server is stopped"


def test_weights_by_files_make_the_same_run_as_weights_by_a_group(usual, tmp_path):
    folder = tmp_path / "weights"
    by_files = train(tmp_path / "files", {"--weight_sync.transport": "disk", "--weight_sync.disk_folder": str(folder)})
    assert without_times(by_files) == without_times(steps(usual))
    assert list(folder.iterdir()) == [], "the last version is removed with the run"


OFFLOADED = {"--grpo.minibatches": "2", "--grpo.kl_coef": "0.05", "--lr_scheduler.total_steps": "3"}


@pytest.fixture(scope="module")
def not_offloaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return train(tmp_path_factory.mktemp("plain") / "run", OFFLOADED)


@pytest.mark.parametrize(
    "where",
    [{"--offload.offload_optimizer_states_for_logprob": None}, {"--offload.optimizer_states": "host"}],
    ids=["window", "host"],
)
def test_offloaded_states_make_the_same_run_also_when_it_is_resumed(where, not_offloaded, tmp_path):
    where = OFFLOADED | where | {"--offload.reference_weights": "host"}
    where |= {"--activation_checkpoint.mode": "full", "--activation_checkpoint.offload": None}
    train(tmp_path / "offloaded", where | {"--training.steps": "2"})
    train(tmp_path / "offloaded", where | {"--checkpoint.resume": None})
    offloaded = steps(tmp_path / "offloaded")
    assert all(line["offload/freed_gib"] > 0 and line["offload/reference_freed_gib"] > 0 for line in offloaded[1:])
    assert all("offload/activations_exposed_s" in line for line in offloaded)
    for one, other in zip(not_offloaded, offloaded, strict=True):
        for name in ("train/loss", "train/grad_norm", "policy/kl", "policy/entropy", "reward/mean"):
            assert other[name] == one[name], (one["step"], name)


CONTEXT = {"--parallelism.context_parallel_degree": "2", "--checkpoint.interval": "2"}


def test_batches_are_packed_ahead_but_not_before_a_checkpoint_or_a_validation(tmp_path):
    flags = {"--async_grpo.max_trajectory_age_steps": "3", "--async_grpo.run_ahead": "full", "--grpo.minibatches": "2"}
    flags |= BACKGROUND | {"--training.steps": "6", "--checkpoint.interval": "3", "--metrics.samples_per_step": "1000"}
    flags |= {"--validation.freq": "5"}
    flags |= {"--rollout.max_answer_tokens": "4"}  # answers are there before a step is trained
    # Steps that move the policy far: what is left of older answers at the resume says nothing about the servers.
    flags |= {"--optimizer.lr": "0.02", "--grpo.zero_variance_groups": "keep", "--grpo.entropy_coef": "0.01"}
    lines = train(tmp_path, flags, ranks=2)
    ahead = [line["pack/ahead"] for line in lines]
    assert ahead[0] == ahead[3] == ahead[5] == 0, "the first step, that after a checkpoint and that after a validation"
    assert sum(ahead) >= 2
    assert all(line["rollout/age_max"] <= 3 for line in lines)
    shutil.rmtree(tmp_path / "checkpoint" / "step-6")
    resumed = train(tmp_path, flags | {"--checkpoint.resume": None}, ranks=2)
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    assert any(line["policy/mismatch_abs"] > 0.2 for line in resumed[3:])
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    groups = {(sample["step"], sample["prompt_index"]) for sample in samples}
    assert len(samples) == len(groups) * 4 == 6 * 8 * 4
    # No prompt comes twice in these steps: what the first three took does not come again.
    assert len({prompt for _, prompt in groups}) == 6 * 8


def test_metrics_of_a_step_with_two_minibatches(tmp_path):
    """The first one moves the policy far."""
    flags = {"--grpo.minibatches": "2", "--training.steps": "1", "--optimizer.lr": "0.02"}
    flags |= {"--grpo.proximal_logprobs": "sampler", "--grpo.importance_correction": "none"}
    flags |= {"--grpo.entropy_coef": "100", "--grpo.loss_aggregation": "sequence"}  # the loss is all entropy
    (line,) = train(tmp_path / "run", flags)
    assert line["policy/update_kl"] > 0.1 and line["policy/mismatch_abs"] < 1e-4
    assert line["train/loss"] == pytest.approx(-100 * line["policy/entropy"], rel=0.1)
    assert line["train/grad_norm_max"] > line["train/grad_norm"] > line["train/grad_norm_max"] / 2


@pytest.fixture(scope="module")
def trained_start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights after one step, for runs on any number of ranks: random ones depend on that number."""
    folder = tmp_path_factory.mktemp("start") / "run"
    train(folder, {"--training.steps": "1"})
    return str(folder / "checkpoint" / "step-1" / "hf")


@pytest.mark.parametrize(
    "flags",
    [
        {"--grpo.minibatches": "2", "--grpo.kl_coef": "0.05", "--grpo.kl_placement": "reward"},
        {"--grpo.policy_loss": "gspo", "--grpo.loss_aggregation": "sequence", "--grpo.kl_coef": "0.05"},
        {"--grpo.kl_coef": "0.05", "--grpo.kl_placement": "reward"} | CONTEXT,
    ],
    ids=["minibatches-kl-in-reward", "gspo-kl-in-loss", "context-parallel"],
)
def test_two_ranks_learn_what_one_rank_learns(flags, trained_start, tmp_path):
    flags = flags | {"--model.hf_assets_path": trained_start, "--model.weights": "hf", "--sft.steps": "0"}
    flags |= {"--metrics.samples_per_step": "1000"}
    alone = train(tmp_path / "one", {flag: value for flag, value in flags.items() if flag not in CONTEXT})
    sharded = train(tmp_path / "two", flags, ranks=2)
    for one, two in zip(alone, sharded, strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "policy/kl", "policy/entropy"):
            assert two[name] == pytest.approx(one[name], abs=2e-4), (one["step"], name)
    if CONTEXT.items() <= flags.items():
        shutil.rmtree(tmp_path / "two" / "checkpoint" / "step-3")
        resumed = train(tmp_path / "two", flags | {"--checkpoint.resume": None}, ranks=2)
        assert without_times(resumed) == without_times(sharded)
    samples = [json.loads(line) for line in (tmp_path / "one" / "samples.jsonl").read_text().splitlines()]
    groups = defaultdict(list)
    for sample in samples:
        if sample["step"] > 1:  # in step 1 the policy is the reference
            groups[sample["step"], sample["prompt_index"]].append(sample)
    by_reward = [s["reward"] - fmean(s["reward"] for s in group) for group in groups.values() for s in group]
    shown = [s["advantage"] for group in groups.values() for s in group]
    assert (shown == pytest.approx(by_reward, abs=1e-9)) == (flags.get("--grpo.kl_placement") != "reward")
    for group in groups.values():
        assert sum(s["advantage"] for s in group) == pytest.approx(0, abs=1e-6)
