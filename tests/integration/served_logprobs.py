"""What a server answers against what transformers computes."""

import requests
import torch
from transformers import PreTrainedModel

PROMPT = list(range(5, 25))


def worst_logprob_difference(url: str, reference: PreTrainedModel) -> float:
    """Greedy tokens of the server; its log-probabilities against transformers' over the same sequence."""
    sampling = {"n": 1, "max_tokens": 12, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    reply = requests.post(
        url + "/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling}, timeout=60
    )
    choice = reply.json()["choices"][0]
    answer = choice["token_ids"]
    served = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((served - expected).abs().max())
