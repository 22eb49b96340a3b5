"""The supervised loss and its gradient, against transformers' own on labels masked by -100."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.data.samples import Document
from torchtitan.grpo.model.packed import make_packed
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.batch import supervised_samples
from torchtitan.grpo.policy.gradients import accumulate_gradients, clip_gradients
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.sft import summed, supervised_loss, token_metrics

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.2,
    tie_word_embeddings=False,
)


def conversations() -> list[Document]:
    """Of several turns, of one, trained from the first token, and with a tail that is not trained."""
    draw = np.random.default_rng(0)
    masks = [draw.random(n) < 0.4 for n in (40, 3, 17, 64, 9)]
    masks[0][-7:] = False
    masks[1][:] = [False, True, True]
    masks[2][:] = True
    return [Document(draw.integers(0, 97, len(mask)).astype(np.int32), mask) for mask in masks]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    source = resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 128)
    with torch.device("meta"):
        model = source.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    load_hf_weights(model, source, folder)
    make_packed(model)
    return source, model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_gradient_and_accuracy_equal_transformers(models, ranks):
    source, model, reference = models
    documents = conversations()
    prompt = torch.tensor([[5]])
    greedy = reference.generate(prompt, attention_mask=prompt, max_new_tokens=11, min_new_tokens=11, do_sample=False)
    documents.append(Document(greedy[0].numpy().astype(np.int32), np.ones(12, bool)))
    reference.zero_grad()
    model.zero_grad()
    # transformers shifts the labels itself: the first token has no prediction.
    trained = sum(int(document.trained[1:].sum()) for document in documents)
    loss, right = torch.zeros(()), 0
    for document in documents:
        ids = torch.from_numpy(document.token_ids).long()[None]
        labels = ids.where(torch.from_numpy(document.trained)[None], -100)
        out = reference(ids, labels=labels, num_items_in_batch=trained)
        loss = loss + out.loss
        right += int((out.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum())
    loss.backward()

    samples = supervised_samples(documents)
    rows = [Microbatch.of(row, "cpu") for own in pack(samples, 72, ranks) for row in own]
    assert len(rows) >= 2, "documents share rows"
    sums = accumulate_gradients(model, rows, lambda _, row: supervised_loss(model, row), reduce_once=False)
    norm = clip_gradients(model, 1e9)
    assert token_metrics({name: float(value) for name, value in sums.items()}) == pytest.approx(
        {"loss": loss.item(), "token_accuracy": right / trained}, rel=1e-6
    )
    gradients = source.adapter.to_hf({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-7, rtol=2e-5, msg=lambda m, n=name: n + m)
    own_norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    torch.testing.assert_close(norm, own_norm, rtol=1e-5, atol=0)
    with torch.no_grad():
        again = summed(supervised_loss(model, row)[1] for row in rows)
    assert {name: float(value) for name, value in again.items()} == {name: float(value) for name, value in sums.items()}
