"""Which folders the embedded server loads, and that it samples from what transformers computes of them."""

import pytest
import torch
from transformers import FalconH1Config, GptOssConfig, Lfm2Config, MambaConfig, PreTrainedModel

from tests.helpers.any_models import BY_DOCUMENT, KINDS, save
from torchtitan.grpo.engines.embedded.generator import Generator, Request
from torchtitan.grpo.engines.embedded.model import load_model, logits_of
from torchtitan.grpo.engines.embedded.scoring import token_logprobs
from torchtitan.grpo.engines.protocol import SamplingParams
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.model.families import MODEL_TYPES


def expected(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BY_DOCUMENT])
def test_windows_softcaps_and_scales_are_the_models(kind, tmp_path):
    """Rows of several lengths, which join at different times, with answers that grow beyond the window."""
    reference = save(kind, tmp_path)
    model = load_model(tmp_path, torch.device("cpu"), torch.float32)
    generator = Generator(model, max_sequences=8, max_model_len=128)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    prompts = [[5 + i % 90 for i in range(start, start + length)] for start, length in ((0, 3), (7, 21), (30, 12))]
    generator.add([Request("first", prompts[0], params)])
    finished = generator.step() + generator.step()
    generator.add([Request(str(i), prompt, params) for i, prompt in enumerate(prompts[1:])])
    while generator.busy:
        finished += generator.step()
    assert len(finished) == 3
    for request in finished:
        for answer in request.answers:
            found = torch.tensor(answer.logprobs)
            torch.testing.assert_close(
                found, expected(reference, request.prompt_ids, answer.token_ids), atol=1e-4, rtol=0
            )
    (known,) = token_logprobs(model, [prompts[1]])
    scored = torch.tensor([each[token] for each, token in zip(known, prompts[1][1:], strict=True)])
    torch.testing.assert_close(scored, expected(reference, prompts[1][:1], prompts[1][1:]), atol=1e-4, rtol=0)


def test_logits_of_a_bfloat16_model_are_not_rounded(tmp_path):
    """With a softcap."""
    save("gemma2", tmp_path)
    model = load_model(tmp_path, torch.device("cpu"), torch.bfloat16)
    hidden = torch.randn(2, 3, model.config.hidden_size).bfloat16()
    cap = model.config.final_logit_softcapping
    exact = cap * torch.tanh(hidden.double() @ model.lm_head.weight.double().T / cap)
    logits = logits_of(model, hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(num_hidden_layers=1, hidden_size=32),
        Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        FalconH1Config(num_hidden_layers=1),
        GptOssConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_local_experts=4, vocab_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_what_it_does_not_run_is_refused_by_name(config, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"and {', '.join(MODEL_TYPES.values())}, not '{config.model_type}'"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)
