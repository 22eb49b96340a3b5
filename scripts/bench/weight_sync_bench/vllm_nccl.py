"""`vllm-nccl`: vLLM's own NCCL weight transfer, with which a refit is compared."""

import argparse
import time
from concurrent.futures import Future
from urllib.parse import urlsplit

import torch
from bench_common.output import Output, cell, medians
from bench_common.process import free_port

from torchtitan.grpo.engines.http_control import ServerError
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.weight_wire.transport import in_thread

from .trainer import bounded, hf_tensors, shape_source

COLUMNS = "num_buffers buffer_mib total_ms pause_ms start_ms move_ms finish_ms resume_ms gb_per_s move_gb_per_s"
_LOCALHOST = "127.0.0.1"


def vllm_nccl(args: argparse.Namespace, out: Output) -> None:
    """`vllm-nccl`: whole, unsharded bfloat16 tensors on this GPU to a server, by vLLM's own engine."""
    if not torch.cuda.is_available():
        raise UserError("vllm-nccl needs a CUDA device")
    engine = _vllm_engine()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    shapes = hf_tensors(shape_source(args.shape))
    tensors = [(name, torch.randn(shape, device=device).bfloat16()) for name, shape in shapes.items()]
    size = sum(tensor.nbytes for _, tensor in tensors)
    control = VllmControl(args.url, None, args.timeout_s)
    control.wait_healthy(args.timeout_s)
    communicator = _join_vllm(engine, control, args.timeout_s)
    packed = {"packed_buffer_size_bytes": args.bucket_mib << 20, "packed_num_buffers": args.num_buffers}
    samples = [
        _push(engine, control, communicator, tensors, packed | {"packed": True}, version, args.timeout_s)
        for version in range(args.warmup + args.repeats)
    ]
    seconds = medians(samples[args.warmup :])
    row = {"shape": args.shape, "bytes": size, "num_buffers": args.num_buffers, "buffer_mib": args.bucket_mib}
    row |= {f"{phase}_ms": 1e3 * value for phase, value in seconds.items()}
    row |= {"gb_per_s": size / seconds["total"] / 1e9, "move_gb_per_s": size / seconds["move"] / 1e9}
    title = f"vLLM's own NCCL weight transfer (packed), Qwen3's {args.shape} shape, {cell(size / 1e9)} GB unsharded"
    out.table(f"{title}: medians of {args.repeats}", COLUMNS, [row])


def _vllm_engine():
    try:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    except ImportError as error:
        raise UserError(f"vllm-nccl needs vLLM in this Python ({error})") from error
    if not hasattr(NCCLWeightTransferEngine, "trainer_send_weights"):
        raise UserError("vllm-nccl needs vLLM 0.25, whose NCCL engine has trainer_send_weights")
    return NCCLWeightTransferEngine


def _join_vllm(engine, control: VllmControl, timeout_s: float):
    if urlsplit(control.url).hostname not in (_LOCALHOST, "localhost"):
        raise UserError(f"vllm-nccl: --url {control.url}: the server must run on this machine")
    meeting = {"master_address": _LOCALHOST, "master_port": free_port(), "world_size": 1 + control.world_size()}
    serving = in_thread(lambda: control.init_transfer(meeting | {"rank_offset": 1}), "bench-init")

    def check() -> None:
        try:
            _raise_error(serving)
        except (UserError, ServerError) as error:
            raise UserError(
                f"{control.url} does not take part: start it with --weight-transfer-config "
                f'\'{{"backend": "nccl"}}\', not with this project\'s engine. It said: {error}'
            ) from error

    def join():
        torch.cuda.set_device(0)
        return engine.trainer_init(meeting)

    return bounded(
        in_thread(join, "bench-join"), timeout_s, f"{control.url} to join vLLM's weight-transfer group", check
    )


def _raise_error(future: Future) -> None:
    if future.done():
        future.result()


def _push(engine, control: VllmControl, communicator, tensors: list, packed: dict, version: int, timeout_s: float):
    """Seconds of each phase of one push. `packed` says how vLLM packs tensors into buffers."""
    update = packed | {"names": [name for name, _ in tensors], "dtype_names": ["bfloat16"] * len(tensors)}
    update["shapes"] = [list(tensor.shape) for _, tensor in tensors]
    seconds: dict[str, float] = {}

    def timed(phase: str, call) -> None:
        started = time.perf_counter()
        call()
        seconds[phase] = time.perf_counter() - started

    def send() -> None:
        torch.cuda.set_device(0)
        engine.trainer_send_weights(iter(tensors), packed | {"group": communicator})
        torch.cuda.synchronize()

    def move() -> None:
        serving = in_thread(lambda: control.update(update), "bench-update")
        bounded(
            in_thread(send, "bench-send"), timeout_s, f"{control.url} to receive weights", lambda: _raise_error(serving)
        )
        bounded(serving, timeout_s, f"{control.url} to finish /update_weights")

    torch.cuda.synchronize()
    started = time.perf_counter()
    timed("pause", lambda: control.pause(mode="keep", clear_cache=True))
    timed("start", control.start_update)
    timed("move", move)
    timed("finish", lambda: control.finish_update(str(version)))
    timed("resume", control.resume)
    seconds["total"] = time.perf_counter() - started
    return seconds
