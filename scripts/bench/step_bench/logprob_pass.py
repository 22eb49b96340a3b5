"""From hidden states to log-probabilities alone: full logits against `token_logprobs`, forward and with backward."""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.grpo.model.logprobs import token_logprobs

from .measure import GIB, Stopwatch, allocated, device_name, peak_allocated, reset_peak, synchronize
from .setup import Setup


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """hidden [T, D], weight [V, D], targets [T] -> log-probabilities, float32 [T]."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, compile: bool) -> Tensor:
    return token_logprobs(hidden, weight, targets, 1.0, compile=compile)[0]


def logprob_pass(setup: Setup) -> Iterator[dict[str, Any]]:
    """A row for each way, pass and compilation. One that does not fit, or computes something else, has an error."""
    job, args, device = setup.job, setup.source.model_args, setup.device
    dtype = TORCH_DTYPE_MAP[setup.config.training.mixed_precision_param]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    hidden, weight = normal(job["tokens"], args.dim), (normal(args.vocab_size, args.dim) / args.dim**0.5)
    targets = torch.randint(args.vocab_size, (job["tokens"],), generator=generator, device=device)

    def call(logprobs: Callable[..., Tensor], backward: bool) -> Tensor:
        hidden.requires_grad_(backward)
        weight.requires_grad_(backward)
        found = logprobs(hidden, weight, targets)
        if backward:
            found.sum().backward()
        hidden.grad = weight.grad = None  # or they would count as held before the next call
        return found.detach()

    reference = None
    compilations = (False, True) if setup.config.compile.enable else (False,)
    for compiled, way, backward in itertools.product(compilations, ("full logits", "token_logprobs"), (False, True)):
        logprobs = torch.compile(full_logits) if compiled else full_logits
        if way == "token_logprobs":
            logprobs = functools.partial(in_chunks, compile=compiled)
        row = {"way": way, "pass": "forward + backward" if backward else "forward"}
        row |= {"compile": "yes" if compiled else "no", "tokens": job["tokens"], "vocabulary": args.vocab_size}
        row |= {"width": args.dim, "device": device_name(device)}
        try:
            row |= timed(functools.partial(call, logprobs, backward), device, job["warmup"], job["steps"])
            row["mean_logprob"] = mean = call(logprobs, backward).mean().item()
            reference = mean if reference is None else reference
            if abs(mean - reference) > 1e-2:
                row["error"] = f"mean log-probability {mean:.4f}, not {reference:.4f}"
        except torch.OutOfMemoryError as error:
            row["error"] = f"out of memory: {str(error).splitlines()[0]}"
            hidden.grad = weight.grad = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield row


def timed(call: Callable[[], object], device: torch.device, warmup: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of `call`, and on CUDA the most memory that it holds above what was held before."""
    for _ in range(warmup):
        call()
    synchronize(device)
    held = allocated(device)
    reset_peak(device)
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(repeats):
        call()
        watch.mark()
    found = {"ms": statistics.median(watch.laps_ms())}
    return found | ({"peak_gib": (peak_allocated(device) - held) / GIB} if device.type == "cuda" else {})
