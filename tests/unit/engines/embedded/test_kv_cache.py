"""Keys and values in transformers' interface, by the name that a model's forward has for them."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.engines.embedded.kv_cache import cache_argument
from torchtitan.grpo.engines.embedded.scoring import token_logprobs
from torchtitan.grpo.engines.protocol import SamplingParams


class Before(nn.Module):
    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> None: ...


class Now(nn.Module):
    def forward(self, input_ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> None: ...


class Decorated(nn.Module):
    """As transformers' classes are, whose decorators take any argument."""

    @functools.wraps(Now.forward)
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(("kind", "name"), [(Before, "past_key_values"), (Now, "cache"), (Decorated, "cache")])
def test_the_cache_goes_by_the_name_that_forward_has_for_it(kind: type[nn.Module], name: str) -> None:
    assert cache_argument(kind()) == name


def test_this_transformers_takes_the_name_without_a_warning() -> None:
    """Generation and scoring, with keys and values of a shared prompt."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    prompt = list(range(1, 33)) * 10
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*past_key_values")
        generator = Generator(model, max_sequences=2, max_model_len=400)
        generator.add([Request("r", prompt, SamplingParams(n=2, temperature=1.0, max_tokens=3, seed=1))])
        answers = generator.step()
        while not answers:
            answers = generator.step()
        token_logprobs(model, [prompt + answer.token_ids for answer in answers[0].answers])
