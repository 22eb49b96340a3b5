"""One contender in a process, or under torchrun ranks, of its own: `python -m step_bench.child FOLDER`.

FOLDER holds job.json; each rank writes rank<N>.json: {"rows": [...]} and more, {"error": ...} if it failed, or
{"refused": ...} if the arguments cannot work for any contender. Meanwhile the file holds what is there already, with
{"unfinished": true}; what was there stays beside an error.
"""

import faulthandler
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
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
from .setup import Setup, checkpointing

Result = dict[str, Any]


def run(job: dict[str, Any]) -> Iterator[Result]:
    """What the contender has found so far, each time more."""
    name = job["contender"]
    if name == "plan":
        yield {"rows": [plan(Setup(job, distributed=False))]}
        return
    if name in ("logprobs", "offload"):
        one_by_one = logprob_pass(Setup(job, distributed=False)) if name == "logprobs" else offload_pass(Setup(job))
        rows = []
        for row in one_by_one:
            rows.append(row)
            yield {"rows": rows}
        return
    setup = Setup(job)
    if name == "torchtitan" and setup.device.type == "cpu":
        yield {"left_out": "its varlen attention needs CUDA"}
        return
    contender = CONTENDERS[name](setup)
    row = measure(setup, contender)
    if name == "ours":
        row["estimate_gib"] = sum(setup.estimate.values()) / GIB
        row["estimate"] = setup.estimate
    yield {"rows": [row]}
    if job["profile"]:
        trace = Path(job["profile"]) / f"{job['shape']}_{name}_rank{dist.get_rank()}.json"
        profile = profile_step(lambda: update(setup, contender), setup.device, trace)
        yield {"rows": [row]} | profile | {"trace": str(trace)}


def plan(setup: Setup) -> dict[str, Any]:
    """What is known before a run."""
    job, work = setup.job, setup.work
    return {
        "parameters": setup.parameters,
        "gpus": job["gpus"],
        "work": f"{work.microbatches} x {job['tokens']:,}",
        "documents": f"{work.microbatches * work.documents} x {work.length:,}",
        "trained_tokens": work.trained_tokens,
        "ac": checkpointing(setup.config),
        "step_tflop": setup.flops / 1e12,
        "step_at_peak_ms": setup.flops / (job["peak_tflops"] * 1e9),
        "estimate_gib": sum(setup.estimate.values()) / GIB,
        "estimate": setup.estimate,
    }


def main(folder: Path) -> int:
    job = json.loads((folder / "job.json").read_text())
    faulthandler.dump_traceback_later(job["limit_s"], exit=True)  # should its parent be gone
    logging.disable(logging.INFO)
    path = folder / f"rank{os.environ.get('RANK', '0')}.json"

    def write(result: Result) -> None:
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(path)

    result: Result = {}
    try:
        for result in run(job):
            write(result | {"unfinished": True})
    except UserError as error:
        result = {"refused": str(error)}
    except ModuleNotFoundError as error:
        result = {"error": f"{error.name} is not installed"}
    except torch.OutOfMemoryError as error:
        result = result | {"error": f"out of memory: {str(error).splitlines()[0]}"}
        traceback.print_exc()
    except Exception as error:
        result = result | {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        traceback.print_exc()
    write(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without asking the other ranks, which may wait for one that failed.
    os._exit(1 if "error" in result or "refused" in result else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
