"""Log-probabilities of given tokens: against transformers, whatever the sequences share."""

import pytest
import torch

from tests.helpers.embedded_servers import tiny_model
from torchtitan.grpo.engines.embedded import scoring
from torchtitan.grpo.engines.embedded.scoring import token_logprobs

SEQUENCES = {
    "a group": [[5, 9, 30, 17, 7, 3], [5, 9, 30, 17, 14], [5, 9, 30, 17, 14, 2, 2, 8]],
    "two alike": [[5, 9, 4], [5, 9, 4]],
    "one begins the other": [[5, 9], [5, 9, 4, 4]],
    "one token": [[5], [5, 9]],
    "nothing shared": [[5, 9, 3], [6, 9, 3]],
    "alone": [[1, 2, 3]],
}


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_what_sequences_share_changes_nothing(sequences, top_k, monkeypatch):
    monkeypatch.setattr(scoring, "WORTH_TOKENS", 1)
    for ids, found in zip(sequences, token_logprobs(tiny_model(), sequences, 1.2, top_k), strict=True):
        with torch.no_grad():
            expected = (tiny_model()(torch.tensor([ids])).logits[0].float() / 1.2).log_softmax(-1)
        assert len(found) == len(ids) - 1
        for known, of_all, token in zip(found, expected, ids[1:], strict=False):
            assert set(known) == {token, *of_all.topk(top_k).indices.tolist()}
            assert known == pytest.approx({each: of_all[each].item() for each in known}, abs=1e-5)


def test_a_prompt_that_a_group_shares_is_computed_once(monkeypatch):
    model, computed = tiny_model(), []
    plain = model.base_model.forward

    def forward(*args, **kwargs):
        computed.append(kwargs["input_ids"].numel())
        return plain(*args, **kwargs)

    monkeypatch.setattr(model.base_model, "forward", forward)
    token_logprobs(model, [[*range(30), 7, 3], *[[*range(30), 14]] * 9])
    assert computed == [30, 20]
    token_logprobs(model, [[*range(30), 7, 3], [*range(30), 14]])
    assert computed[2:] == [64], "a pass of its own would cost more than it saves"
