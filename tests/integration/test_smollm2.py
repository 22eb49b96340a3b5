"""A pretrained model: SmolLM2-135M-Instruct against transformers, through two GRPO steps, and exported."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import COMMAND, ROOT
from tests.helpers.microbatches import microbatches
from tests.helpers.ranks import Ranks
from tests.helpers.trainer_runs import embedded_server, environment, steps
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.rows import PackedSample

MADE = Path.home() / ".cache" / "torchtitan-grpo" / "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STEPS = 2
RUN = {
    "--job.config_file": "train_configs/smollm2_sums_1gpu.toml",
    "--training.steps": STEPS,
    "--rollout.engine": "embedded",
    "--rollout.no-colocate": None,
    "--training.mixed_precision_param": "float32",
    "--data.source_args": (
        '{"max": 60, "question": "What is {left} + {right}? Answer with the number only.", "size": 200}'
    ),
    "--grpo.prompts_per_step": 1,
    "--grpo.group_size": 4,
    "--rollout.max_answer_tokens": 6,
    # Nearly every answer has another reward: no step is without advantages.
    "--reward.functions": "numeric_match,tests.helpers.rewards:varied",
    "--validation.prompts": 2,
    "--metrics.no-enable_tensorboard": None,
}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The folder, made once for all checkouts."""
    script = [*COMMAND, "smollm2", str(MADE)]
    made = subprocess.run(script, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    if made.returncode == 2:
        pytest.skip(made.stderr[-500:])
    assert made.returncode == 0, made.stderr[-2000:]
    return MADE


@pytest.fixture(scope="module")
def run(smollm2, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    with embedded_server(smollm2, folder.parent / "server.log") as url:
        given = RUN | {"--model.hf_assets_path": smollm2, "--rollout.urls": url, "--job.dump_folder": folder}
        words = [word for flag in given.items() for word in flag if word is not None]
        script = ROOT / "grpo_train.py"
        Ranks(1, script, *words, log=folder.parent / "log", environment=environment()).check(270)
    yield folder
    shutil.rmtree(folder / "checkpoint")  # 1.9 GB


def exported(run: Path) -> Path:
    return run / "checkpoint" / f"step-{STEPS}" / "hf"


@torch.no_grad()
def reference(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[T - 1] log-probabilities of all tokens but the first, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def test_logprobs_are_those_of_transformers_and_the_model_knows_something(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer("The capital of France is Paris.")["input_ids"], tokenizer.eos_token_id]
    source = resolve_model(SimpleNamespace(hf_assets_path=str(smollm2), weights="hf"), 128)
    with torch.device("meta"):
        model = source.build()
    make_packed(model, compile=False)
    model.to_empty(device="cpu")
    (row,) = microbatches([PackedSample(prompt, answer, 1.0, 1.0, [0.0] * len(answer))], 128, 1)[0]
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        load_hf_weights(model, source, smollm2)
        logprobs = model(row, 1.0)[0]
    expected = reference(smollm2, torch.tensor([*prompt, *answer]))[-len(answer) :]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert expected.mean() > -0.5  # random weights have -10.8
    # The rule that takes digits apart comes before the one that joins spaces.
    assert tokenizer.convert_ids_to_tokens(tokenizer("is  37")["input_ids"]) == ["is", "ĠĠ", "3", "7"]


def test_two_steps_train_on_what_the_server_samples(run):
    taken = steps(run)
    assert [line["step"] for line in taken] == [1, 2]
    for line in taken:
        assert line["train/grad_norm"] > 0 and line["policy/mismatch_abs"] < 1e-4
    assert "validation/greedy_reward" in taken[-1]
    answers = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert any(answer["answer"].strip() for answer in answers)


def test_the_export_samples_in_transformers_and_has_learned(smollm2, run):
    tokenizer = AutoTokenizer.from_pretrained(exported(run))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(exported(run), dtype=torch.float32).eval()
    out = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt.shape[1] :])
    start = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2  # bfloat16 rounds away what the norms' weights have learned
