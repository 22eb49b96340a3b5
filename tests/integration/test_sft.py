"""sft_train.py: several ranks, kill and resume, stop and resume, and what it exports."""

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import environment, steps, without_times
from torchtitan.grpo.config.job_config import Data, Sft
from torchtitan.grpo.data.conversations import ConversationSource
from torchtitan.grpo.data.tokenizer import load_tokenizer
from torchtitan.grpo.process.stopping import STOPPED

STEPS, INTERVAL, HELD_OUT = 60, 20, 24
FLAGS = {
    "--job.config_file": "train_configs/sft_quickstart.toml",
    "--training.steps": STEPS,
    "--data.source_args": '{"max": 39, "size": 500}',
    "--sft.batch_size": 16,
    "--validation.prompts": HELD_OUT,
    "--validation.freq": 10,
    "--checkpoint.interval": INTERVAL,
    "--checkpoint.resume": "auto",
    "--metrics.no-enable_tensorboard": None,
}


SLOW = ROOT / "tests" / "helpers" / "slow_sft.py"


def start(folder: Path, ranks: int = 1, script: Path = ROOT / "sft_train.py", **flags: object) -> Ranks:
    given = FLAGS | {"--job.dump_folder": folder} | {f"--{name}": value for name, value in flags.items()}
    words = [word for flag in given.items() for word in flag if word is not None]
    log = folder.parent / f"{folder.name}.log"
    return Ranks(ranks, script, *words, log=log, environment=environment())


def export(folder: Path, step: int = STEPS) -> Path:
    return folder / "checkpoint" / f"step-{step}" / "hf"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("sft") / "whole"
    start(folder).check()
    return folder


def test_a_killed_and_a_stopped_run_end_as_the_undisturbed_one(whole, tmp_path):
    folder = tmp_path / "run"
    run = start(folder, script=SLOW)
    saved = folder / "checkpoint" / f"step-{INTERVAL}"
    run.wait_until("a step after a checkpoint", lambda: saved.is_dir() and len(steps(folder)) > INTERVAL)
    run.kill()
    run = start(folder, script=SLOW)
    run.wait_until("more steps", lambda: f"step {INTERVAL + 5}/" in run.log)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == STOPPED, run.log[-4000:]
    stopped_at = len(steps(folder))
    assert f"stopped at step {stopped_at}" in run.log and INTERVAL + 5 <= stopped_at < STEPS
    assert export(folder, stopped_at).is_dir()
    start(folder).check()
    lines, expected = without_times(steps(folder)), without_times(steps(whole))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        # What a process counts from its own start.
        assert {k: v for k, v in line.items() if not k.startswith("checkpoint/")} == {
            k: v for k, v in other.items() if not k.startswith("checkpoint/")
        }
    weights = "model.safetensors"
    assert (export(folder) / weights).read_bytes() == (export(whole) / weights).read_bytes()


def test_two_ranks_train_what_one_does(whole, tmp_path):
    # Random weights differ with the number of ranks.
    flags = {"model.weights": "hf", "model.hf_assets_path": export(whole, 40), "training.steps": 10}
    for ranks in (1, 2):
        start(tmp_path / f"{ranks}", ranks, **flags).check()
    one, two = steps(tmp_path / "1"), steps(tmp_path / "2")
    names = (
        "train/loss",
        "train/grad_norm",
        "train/token_accuracy",
        "train/answer_tokens",
        "train/tokens",
        "data/epoch",
    )
    for name in (*names, "validation/loss", "validation/token_accuracy"):
        expected = [line[name] for line in one if name in line]
        assert [line[name] for line in two if name in line] == pytest.approx(expected, rel=1e-4) and expected, name


def test_the_export_has_the_validation_loss_in_transformers(whole):
    tokenizer = load_tokenizer(str(export(whole)))
    data = Data(source_args={"max": 39, "size": 500}, chat_template=False)
    end = [tokenizer.eos_token_id]
    source = ConversationSource(
        data, tokenizer, 0, sft=Sft(), seq_len=64, end_ids=end, held_out=True, validation_prompts=HELD_OUT
    )
    model = AutoModelForCausalLM.from_pretrained(export(whole), dtype=torch.float32).eval()
    losses, right = [], []
    for conversation in source.first(HELD_OUT):
        (document,) = conversation.documents
        ids = torch.from_numpy(document.token_ids).long()
        trained = torch.from_numpy(document.trained)[1:]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1][trained]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:][trained], reduction="none"))
        right.append(logits.argmax(-1) == ids[1:][trained])
    last = steps(whole)[-1]
    assert last["validation/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert last["validation/token_accuracy"] == pytest.approx(torch.cat(right).float().mean().item(), rel=1e-6)
    assert last["validation/loss"] < 0.7 * steps(whole)[9]["validation/loss"], "it has learned"
