"""The cause that differences of log-probabilities and of weights amount to."""

import numpy as np
import pytest

from torchtitan.grpo.rollouts.diagnosis import Evidence, Probe, cause

LIMIT, PROMPT, ANSWER = 0.2, 20, 40
RNG = np.random.default_rng(0)


def probe(drawn: np.ndarray | float = 0.0, scored: np.ndarray | float = 0.0, base: float | None = None) -> Probe:
    """Of an answer: by how much what the server says of it differs from the trainer's."""
    trained = -RNG.exponential(1.5, PROMPT + ANSWER - 1)
    sampled, noise = trained[PROMPT - 1 :], RNG.normal(0, 0.01, len(trained))
    of_base = np.zeros(0) if base is None else trained + base
    return Probe(sampled + drawn + noise[PROMPT - 1 :], sampled, trained + scored + noise, trained, of_base)


def noise(size: int, std: float) -> np.ndarray:
    """As where other weights sample: of two signs."""
    return RNG.normal(0, std, size)


def named(probes: list[Probe], **known) -> str:
    return cause(Evidence(LIMIT, probes, **known))


EVERY = PROMPT + ANSWER - 1


@pytest.mark.parametrize("kept", [0.5, 0.7, 0.9])
def test_a_part_of_the_vocabulary(kept: float):
    """Each token's probability over the sum of what is kept, at most 1."""
    said = named([probe(drawn=RNG.uniform(0.8, 1, ANSWER) * -np.log(kept)) for _ in range(4)])
    assert said.startswith("sampling mask: it samples from ") and "top-p" in said


def test_old_keys_and_values():
    either = np.where(np.arange(ANSWER) % 2, -1.0, 2.0)
    later = np.where(np.arange(ANSWER) < 11, 0, either)
    assert named([probe(drawn=later)] * 3).startswith("old keys and values: ")
    assert "from token 12 of an answer on" in named([probe(drawn=later)] * 3)
    assert named([probe(drawn=either)]).startswith("old prefix: ")


def test_what_is_gone():
    assert named([probe()]).startswith("weights of before its newest version, or what it had cached")
    assert named([probe()], in_flight=True).startswith("old keys and values, or weights, of before")


def test_weights_by_name():
    other = [probe(scored=noise(EVERY, 1))]
    one = {"compared": 30, "differing": ["model.layers.1.mlp.up_proj.weight"]}
    assert named(other, **one) == ("weights: 1 of 30 tensors are not the trainer's: model.layers.1.mlp.up_proj.weight")
    expert = {"compared": 30, "differing": ["model.layers.1.mlp.experts.3.up_proj.weight"], "experts": True}
    assert named(other, **expert).startswith("expert: 1 of 30 tensors")
    adapted = [probe(scored=noise(EVERY, 1), base=0.5)]
    assert named(adapted, compared=9, differing=["base_model.model.q_proj.lora_B.weight"]).startswith("adapter: 1 of 9")
    assert named(adapted, compared=9, differing=["model.norm.weight"]).startswith("base: 1 of 9")
    assert named([], compared=3, differing=["a", "b", "c"]).startswith("weights: all 3 of 3 tensors")


def test_an_adapter_that_is_not_there():
    assert named([probe(scored=1.0, base=1.0)]).startswith("adapter: it answers as its base does")
    assert not named([probe(scored=1.0, base=2.0)]).startswith("adapter")


def test_rotary_embeddings_differ_the_more_the_further_tokens_are_apart():
    grows = np.linspace(0, 2, EVERY)
    assert named([probe(scored=grows * noise(EVERY, 1)) for _ in range(4)]).startswith("rope or config: ")


def test_other_experts_for_few_tokens():
    few = np.where(np.arange(EVERY) % 5 == 2, 4.0, 0.0)
    assert named([probe(scored=few)], experts=True, compared=9).startswith("router: ")
    assert named([probe(scored=few)], compared=9).startswith("kernels or precision: ")


def test_equal_weights_that_compute_otherwise():
    assert named([probe(scored=noise(EVERY, 0.5))], compared=9).startswith("kernels or precision: ")
    assert named([probe(scored=noise(EVERY, 5))], compared=9).startswith("kernels, precision or config: ")
    assert named([probe(scored=noise(EVERY, 5))]).startswith("weights, as it seems: ")
    in_fp8 = named([probe(scored=noise(EVERY, 5))], quantized=True)
    assert in_fp8.startswith("weights, or their scales, as it seems: ")
    said = named([probe(scored=noise(EVERY, 5))], compared=9, left_out=2)
    assert said.startswith("weights, as it seems: ") and "2 tensors cannot be read back from it, and 9 others" in said


def test_what_it_does_not_answer():
    assert named([], failed="no reply within 30 s") == "unknown: no reply within 30 s"
    said = named([probe()], tokens="it reads 'a' as [1], and the trainer as [2]")
    assert said.endswith(". Its tokenizer is another one too: it reads 'a' as [1], and the trainer as [2]")
