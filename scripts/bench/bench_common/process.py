"""How a benchmark runs: its exit status, its place among ranks, the environment of its child processes."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable

from process_group import free_port

from bench_common import BENCH, ROOT


def run_program(run: Callable[[], int], limit_s: float) -> int:
    """`run()` as a whole program: its exit status, or 2 after an error that says what to change.

    SIGTERM ends the children too. After `limit_s` the process ends with a traceback of each thread.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    from torchtitan.grpo.engines.protocol import EngineError
    from torchtitan.grpo.errors import UserError

    try:
        return run()
    except (EngineError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        faulthandler.cancel_dump_traceback_later()


def join_torchrun() -> None:
    """Without torchrun, set its variables for a group of one rank."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})


def device_environment(devices: list[str]) -> dict[str, str]:
    """Environment of a child that sees these devices only: GPU indices, or "cpu" alone."""
    return nvls_environment() | {"CUDA_VISIBLE_DEVICES": "" if devices == ["cpu"] else ",".join(devices)}


def nvls_environment() -> dict[str, str]:
    """Many containers have no NVLink multicast, and NCCL fails where it expects it."""
    return {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}


def import_environment() -> dict[str, str]:
    """Environment of a child that imports this tree and the benchmarks' packages."""
    paths = [str(BENCH), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def limited(why: str) -> str:
    """`wait_for`'s reason, with the flag that is the limit."""
    return why + " (--run-limit-s)" * why.startswith("not within")
