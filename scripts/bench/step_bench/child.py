"""One contender in a process, or torchrun ranks, of its own: `python -m step_bench.child FOLDER`.

FOLDER holds job.json. Rank 0 appends its row to rows.jsonl; a rank that fails appends its error.
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

from .contenders import CONTENDERS
from .measure import GIB, measure
from .setup import Setup


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The contender's row."""
    name, setup = job["contender"], Setup(job)
    estimate = {"estimate_gib": sum(setup.estimate.values()) / GIB, "estimate": setup.estimate}
    return measure(setup, CONTENDERS[name](setup)) | (estimate if name == "ours" else {})


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    faulthandler.dump_traceback_later(job["limit_s"], exit=True)  # should its parent be gone
    logging.disable(logging.INFO)

    def append(row: dict[str, Any]) -> None:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    status = 0
    try:
        row = run(job)
        if dist.get_rank() == 0:
            append(row)
    except Exception as error:
        kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        append({"error": f"{kind}: {(str(error).splitlines() or [''])[0]}"})
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without asking the other ranks, which may wait for one that failed


if __name__ == "__main__":
    main(Path(sys.argv[1]))
