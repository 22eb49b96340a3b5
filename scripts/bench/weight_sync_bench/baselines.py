"""What a refit is compared with: raw broadcasts of as many bytes, and vLLM's own NCCL weight transfer."""

import socket
import statistics
import threading
import time
from urllib.parse import urlsplit

import torch
from bench_common.output import Output, Row, cell, medians

from torchtitan.grpo.engines.http_control import ServerError
from torchtitan.grpo.engines.vllm_control import ServerControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.transport import Group, host_store, join_store, wait

from .receivers import Child
from .trainer import bounded, hf_tensors, shape_source

_LOCALHOST = "127.0.0.1"


# ------------------------------------------------------------------------------------------------ raw broadcasts


def raw_broadcasts(args, device: torch.device, size: int, pieces: list[int]) -> list[Row]:
    """Broadcast `size` bytes to a child process on `--raw-gpu`, whole and in pieces: one row for each of `pieces`."""
    store, port = host_store(_LOCALHOST, args.timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    arguments = ["raw-receiver", "--port", str(port), "--bytes", str(size), "--backend", backend]
    arguments += ["--pieces", *map(str, pieces), "--rounds", str(args.warmup + args.repeats)]
    arguments += ["--timeout-s", str(args.timeout_s)]
    child = Child(arguments, "cpu" if device.type == "cpu" else str(args.raw_gpu))
    group = None
    try:
        flat = torch.empty(size, dtype=torch.uint8, device=device)

        def join() -> Group:
            return Group(backend, store, 0, 2, device, args.timeout_s, _LOCALHOST)

        group = bounded(join, args.timeout_s, "the raw receiver to join", child.check)
        rows = []
        for count in pieces:
            seconds = [
                _broadcast(group, flat, count, args.timeout_s, child.check) for _ in range(args.warmup + args.repeats)
            ]
            total = statistics.median(seconds[args.warmup :])
            rows.append({"pieces": count, "bytes": size, "total_ms": 1e3 * total, "gb_per_s": size / total / 1e9})
        return rows
    finally:
        if group is not None:
            group.abort()
        child.close()


def _broadcast(group: Group, flat: torch.Tensor, pieces: int, timeout_s: float, check=lambda: None) -> float:
    """Seconds of one broadcast, from when both ends are ready until the receiver has said that it has everything."""
    deadline = time.monotonic() + timeout_s
    ready = torch.ones(1, dtype=torch.int64, device=flat.device)
    wait(group.all_reduce(ready), deadline, "the other end of a raw broadcast", check)
    _synchronize(flat.device)
    started = time.perf_counter()
    works = [group.broadcast(piece) for piece in flat.tensor_split(pieces)]
    for work in [*works, group.all_reduce(ready)]:
        wait(work, deadline, "a raw broadcast", check)
    _synchronize(flat.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raw_receiver(args) -> None:
    """`raw-receiver`, started by `refit`: the other end of `raw_broadcasts`."""
    device = torch.device(args.device)
    store = join_store(_LOCALHOST, args.port, args.timeout_s)
    flat = torch.empty(args.bytes, dtype=torch.uint8, device=device)
    group = Group(args.backend, store, 1, 2, device, args.timeout_s, _LOCALHOST)
    for count in args.pieces:
        for _ in range(args.rounds):
            _broadcast(group, flat, count, args.timeout_s)


# ------------------------------------------------------------------------------------------ vLLM's own transfer

VLLM_COLUMNS = {
    "num_buffers": "num_buffers",
    "buffer_mib": "buffer, MiB",
    "total_ms": "total, ms",
    "pause_ms": "pause",
    "start_ms": "start",
    "move_ms": "move",
    "finish_ms": "finish",
    "resume_ms": "resume",
    "gb_per_s": "GB/s",
    "move_gb_per_s": "move GB/s",
}


def vllm_nccl(args, out: Output) -> None:
    """`vllm-nccl`: whole, unsharded bfloat16 tensors on this GPU to a server, by vLLM's own engine."""
    if not torch.cuda.is_available():
        raise UserError("vllm-nccl needs a CUDA device")
    engine = _vllm_engine()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    shapes = hf_tensors(shape_source(args.shape))
    tensors = [(name, torch.randn(shape, device=device).bfloat16()) for name, shape in shapes.items()]
    size = sum(tensor.nbytes for _, tensor in tensors)
    control = ServerControl(args.url, None, args.timeout_s)
    control.wait_healthy(args.timeout_s)
    communicator = _join_vllm(engine, control, args.timeout_s)
    rows = []
    for mib in args.bucket_mib:
        for num_buffers in args.num_buffers:
            samples = [
                _push_to_vllm(engine, control, communicator, tensors, num_buffers, mib << 20, version, args.timeout_s)
                for version in range(args.warmup + args.repeats)
            ][args.warmup :]
            seconds = medians(samples)
            row = {"shape": args.shape, "bytes": size, "num_buffers": num_buffers, "buffer_mib": mib}
            row |= {f"{phase}_ms": 1e3 * value for phase, value in seconds.items()}
            row |= {"gb_per_s": size / seconds["total"] / 1e9, "move_gb_per_s": size / seconds["move"] / 1e9}
            rows.append(row)
    title = f"vLLM's own NCCL weight transfer (packed), Qwen3's {args.shape} shape, {cell(size / 1e9)} GB unsharded"
    out.table(f"{title}: medians of {args.repeats}, ms", VLLM_COLUMNS, rows)


def _vllm_engine():
    try:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    except ImportError as error:
        raise UserError(f"vllm-nccl needs vLLM in this Python ({error})") from error
    if not hasattr(NCCLWeightTransferEngine, "trainer_send_weights"):
        raise UserError(
            "vllm-nccl is written for vLLM 0.25, whose NCCL engine has trainer_send_weights; this one has not"
        )
    return NCCLWeightTransferEngine


def _join_vllm(engine, control: ServerControl, timeout_s: float):
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        port = probe.getsockname()[1]
    meeting = {"master_address": _LOCALHOST, "master_port": port, "world_size": 1 + control.world_size()}
    if urlsplit(control.url).hostname not in (_LOCALHOST, "localhost"):
        raise UserError(f"vllm-nccl: --url {control.url}: the server must run on this machine")
    failed: list[Exception] = []

    def served() -> None:
        try:
            control.init_transfer(meeting | {"rank_offset": 1})
        except (UserError, ServerError) as error:
            failed.append(error)

    threading.Thread(target=served, daemon=True).start()

    def check() -> None:
        if failed:
            raise UserError(
                f"{control.url} does not take part: start it with --weight-transfer-config "
                f'\'{{"backend": "nccl"}}\', not with this project\'s engine. It said: {failed[0]}'
            )

    def join():
        torch.cuda.set_device(0)
        return engine.trainer_init(meeting)

    return bounded(join, timeout_s, f"{control.url} to join vLLM's weight-transfer group", check)


def _push_to_vllm(engine, control, communicator, tensors, num_buffers: int, size: int, version: int, timeout_s: float):
    """Seconds of each phase of one push. Packing is as vLLM does it: `size` bytes a buffer, `num_buffers` of them."""
    packed = {"packed": True, "packed_buffer_size_bytes": size, "packed_num_buffers": num_buffers}
    update = packed | {"names": [name for name, _ in tensors], "dtype_names": ["bfloat16"] * len(tensors)}
    update["shapes"] = [list(tensor.shape) for _, tensor in tensors]
    seconds: dict[str, float] = {}

    def timed(phase: str, call) -> None:
        started = time.perf_counter()
        call()
        seconds[phase] = time.perf_counter() - started

    def move() -> None:
        updated: list = []

        def serve() -> None:
            try:
                control.update(update)
            except ServerError as error:
                updated.append(error)

        def send() -> None:
            torch.cuda.set_device(0)
            engine.trainer_send_weights(iter(tensors), packed | {"group": communicator})
            torch.cuda.synchronize()

        def check() -> None:
            if updated:
                raise updated[0]

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        bounded(send, timeout_s, f"{control.url} to receive the weights", check)
        serving.join(timeout_s)
        if serving.is_alive():
            raise UserError(f"{control.url} did not finish /update_weights within {timeout_s:g} s")
        check()

    torch.cuda.synchronize()
    started = time.perf_counter()
    timed("pause", lambda: control.pause(mode="keep", clear_cache=True))
    timed("start", control.start_update)
    timed("move", move)
    timed("finish", lambda: control.finish_update(str(version)))
    timed("resume", control.resume)
    seconds["total"] = time.perf_counter() - started
    return seconds
