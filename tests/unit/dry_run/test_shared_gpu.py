"""Trainer and server on one GPU: the sum, and what is refused."""

import pytest
from transformers import Qwen3Config

from tests.helpers import TINY_QWEN3
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.target import BESIDE_BYTES, GPUS
from torchtitan.grpo.dry_run.describe import describe
from torchtitan.grpo.dry_run.memory import memory_bytes
from torchtitan.grpo.dry_run.shared_gpu import shared_gpu
from torchtitan.grpo.errors import UserError

H200 = GPUS["h200"]
SIZES = {"8B": dict(hidden_size=4096, intermediate_size=12288), "4B": dict(hidden_size=2560, intermediate_size=9728)}
SLEEPS = ["--rollout.sleep_while_training", "--rollout.memory_share"]
COLOCATED = ["--model.weights", "random", "--rollout.engine", "vllm", "--rollout.colocate"]
COLOCATED += ["--training.seq_len", "512", "--data.max_prompt_tokens", "128", "--rollout.max_answer_tokens", "128"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """By size, what describes a Qwen3."""
    base = tmp_path_factory.mktemp("models")
    for name, size in SIZES.items():
        config = Qwen3Config(**size, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        config.architectures = ["Qwen3ForCausalLM"]
        config.tie_word_embeddings = name == "4B"
        config.save_pretrained(base / name)
    return {name: str(base / name) for name in SIZES}


def test_both_sides_and_what_neither_counts_make_the_whole():
    config = load_config(
        [*COLOCATED, "--model.hf_assets_path", str(TINY_QWEN3), "--rollout.memory_share", "0.4"], "h200"
    )
    memory = memory_bytes(config, 1, H200)
    shared = shared_gpu(config, memory, H200)
    assert abs(shared.server + shared.left + BESIDE_BYTES - shared.total) <= 1
    assert shared.server == int(0.4 * H200.memory_bytes) and shared.trainer == memory.total(memory.peak)
    assert shared.weights == 2 * memory.parameters
    text = describe(config, 1, "h200")
    assert "the server is on the same device" in text and f"keys and values of {shared.tokens:,} tokens" in text


def test_a_server_that_sleeps_leaves_the_trainer_its_peak(folders):
    """What is refused beside a server of half an H200 fits in turn with it."""
    words = [*COLOCATED, "--model.hf_assets_path", folders["4B"], "--rollout.memory_share", "0.5"]

    with pytest.raises(UserError, match="sleep_while_training = true"):
        describe(load_config(words, "h200"), 1, "h200")
    config = load_config([*words, "--rollout.sleep_while_training"], "h200")
    memory = memory_bytes(config, 1, H200)
    shared = shared_gpu(config, memory, H200)
    assert shared.left < shared.trainer < shared.alone == H200.memory_bytes - BESIDE_BYTES
    # Between two steps: float32 weights and AdamW state, and what is sent in bfloat16.
    assert 12 * memory.parameters < shared.kept < shared.left
    assert "left while it sleeps" in describe(config, 1, "h200")


@pytest.mark.parametrize(
    ("size", "flags", "says"),
    [
        ("8B", [*SLEEPS, "0.3"], ("sleep_while_training", "at its peak", "137.3 GiB are left")),
        ("4B", [*SLEEPS, "0.7"], ("between two steps the trainer needs", "Lower memory_share")),
        ("8B", ["--rollout.memory_share", "0.5"], ("the trainer needs", "Lower memory_share", "67.4 GiB are left")),
        ("8B", ["--rollout.memory_share", "0.1"], ("memory_share = 0.1 of H200", "is 14.0 GiB", "Raise memory_share")),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys_to_change(size, flags, says, folders):
    config = load_config([*COLOCATED, "--model.hf_assets_path", folders[size], *flags], "h200")
    with pytest.raises(UserError) as error:
        describe(config, 1, "h200")
    for part in says:
        assert part in str(error.value)
