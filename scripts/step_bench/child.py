"""One contender in a process, or under torchrun ranks, of its own: `python -m step_bench.child FOLDER`.

FOLDER holds job.json; each rank writes rank<N>.json: {"rows": [...]} and more, {"error": ...} if it failed, or
{"refused": ...} if the arguments cannot work for any contender.
"""

import faulthandler
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan  # noqa: F401  the overlay's shims come first
from torchtitan.grpo.errors import UserError

from .contenders import CONTENDERS
from .kernels import profile_step
from .logprob_pass import logprob_pass
from .measure import GIB, measure, update
from .offload_pass import offload_pass
from .setup import Setup


def run(job: dict[str, Any]) -> dict[str, Any]:
    name = job["contender"]
    if name == "plan":
        return {"rows": [plan(Setup(job, distributed=False))]}
    if name == "logprobs":
        return {"rows": list(logprob_pass(Setup(job, distributed=False)))}
    setup = Setup(job)
    if name == "offload":
        return {"rows": list(offload_pass(setup))}
    if name == "torchtitan" and setup.device.type == "cpu":
        return {"left_out": "its varlen attention needs CUDA"}
    contender = CONTENDERS[name](setup)
    row = measure(setup, contender)
    if name == "ours":
        row["estimate_gib"] = sum(setup.estimate.values()) / GIB
        row["estimate"] = setup.estimate
    found: dict[str, Any] = {"rows": [row]}
    if name == "ours" and job["profile"]:
        trace = Path(job["profile"]) / f"{job['shape']}_rank{dist.get_rank()}.json"
        found |= profile_step(lambda: update(setup, contender), setup.device, trace) | {"trace": str(trace)}
    return found


def plan(setup: Setup) -> dict[str, Any]:
    """What is known before a run."""
    job, work = setup.job, setup.work
    return {
        "parameters": setup.parameters,
        "gpus": job["gpus"],
        "work": f"{work.microbatches} x {job['tokens']:,}",
        "documents": f"{work.microbatches * work.documents} x {work.length:,}",
        "trained_tokens": work.trained_tokens,
        "ac": setup.config.activation_checkpoint.mode,
        "step_tflop": setup.flops / 1e12,
        "step_at_peak_ms": setup.flops / (job["peak_tflops"] * 1e9),
        "estimate_gib": sum(setup.estimate.values()) / GIB,
        "estimate": setup.estimate,
    }


def main(folder: Path) -> int:
    job = json.loads((folder / "job.json").read_text())
    faulthandler.dump_traceback_later(job["limit_s"], exit=True)  # should its parent be gone
    logging.disable(logging.INFO)
    try:
        result = run(job)
    except UserError as error:
        result = {"refused": str(error)}
    except ModuleNotFoundError as error:
        result = {"error": f"{error.name} is not installed"}
    except torch.OutOfMemoryError as error:
        result = {"error": f"out of memory: {str(error).splitlines()[0]}"}
        traceback.print_exc()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        traceback.print_exc()
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without asking the other ranks, which may wait for one that failed.
    os._exit(0 if "rows" in result or "left_out" in result else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
