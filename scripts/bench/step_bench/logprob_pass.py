"""From hidden states to log-probabilities alone: full logits against `token_logprobs`, forward and with backward."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.grpo.model.logprobs import token_logprobs

from .measure import device_name, timed
from .setup import Setup

Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """hidden [T, D], weight [V, D], targets [T] -> log-probabilities, float32 [T]."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def logprob_pass(setup: Setup) -> Iterator[dict[str, Any]]:
    """One row for each way, pass and compilation; what does not fit is a row with its error."""
    job, args, device = setup.job, setup.source.model_args, setup.device
    dtype = TORCH_DTYPE_MAP[setup.config.training.mixed_precision_param]
    generator = torch.Generator(device).manual_seed(job["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    hidden, weight = normal(job["tokens"], args.dim), (normal(args.vocab_size, args.dim) / args.dim**0.5)
    targets = torch.randint(args.vocab_size, (job["tokens"],), generator=generator, device=device)
    reference = None
    for compiled in (False, True) if setup.config.compile.enable else (False,):
        ways: dict[str, Logprobs] = {
            "full logits": torch.compile(full_logits) if compiled else full_logits,
            "token_logprobs": _ours(compiled),
        }
        for way, logprobs in ways.items():
            for backward in (False, True):
                row = {
                    "way": way,
                    "pass": "forward + backward" if backward else "forward",
                    "compile": "yes" if compiled else "no",
                    "tokens": job["tokens"],
                    "vocabulary": args.vocab_size,
                    "width": args.dim,
                    "device": device_name(device),
                }
                call = _call(logprobs, hidden, weight, targets, backward)
                try:
                    row |= timed(call, device, job["warmup"], job["steps"])
                    mean = call().mean().item()
                    reference = mean if reference is None else reference
                    row["mean_logprob"] = mean
                    if abs(mean - reference) > 1e-2:
                        row["error"] = f"mean log-probability {mean:.4f}, not {reference:.4f}"
                except torch.OutOfMemoryError as error:
                    row["error"] = f"out of memory: {str(error).splitlines()[0]}"
                    hidden.grad = weight.grad = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                yield row


def _ours(compiled: bool) -> Logprobs:
    return lambda hidden, weight, targets: token_logprobs(hidden, weight, targets, 1.0, compile=compiled)[0]


def _call(logprobs: Logprobs, hidden: Tensor, weight: Tensor, targets: Tensor, backward: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        hidden.requires_grad_(backward)
        weight.requires_grad_(backward)
        found = logprobs(hidden, weight, targets)
        if backward:
            found.sum().backward()
        hidden.grad = weight.grad = None  # or they would count as held before the next call
        return found.detach()

    return call
