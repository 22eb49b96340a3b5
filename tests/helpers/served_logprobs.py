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
    return float((served - answer_logprobs(reference, PROMPT, answer)).abs().max())


def answer_logprobs(
    reference: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [tokens of the answer], from one pass over the whole sequence."""
    return answer_distributions(reference, prompt, answer, temperature).gather(1, torch.tensor(answer)[:, None])[:, 0]


@torch.no_grad()
def answer_distributions(
    reference: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [tokens of the answer, vocabulary]."""
    logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1)
