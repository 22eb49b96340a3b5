"""`load`: what a vLLM worker needs to load a version that is on its GPU, by vLLM's own loading and by copies."""

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_common.output import Output, Row, cell
from bench_common.shapes import hf_config

from torchtitan.grpo.inside_vllm.direct_load import DirectLoading
from torchtitan.grpo.weight_wire.buckets import Bucket, plan_buckets, plan_from_json, plan_to_json

COLUMNS = "loading update_ms gb_per_s updates_ms"
MAX_TOKENS = 2048
logger = logging.getLogger("vllm.torchtitan_grpo")


def load(args: argparse.Namespace, out: Output) -> None:
    """The first updates by copies record them and prove them; they are in `updates_ms`, not in `update_ms`."""
    from vllm import LLM

    from torchtitan.grpo.weight_sync.published import model_weights

    from .trainer import shape_source

    source = shape_source(args.shape)
    with torch.device("meta"):
        published = model_weights(source.build(), source.adapter, torch.bfloat16, source.tied)
    buckets = plan_buckets([tensor.spec for tensor in published.tensors], args.bucket_mib << 20)
    size = sum(bucket.payload_bytes for bucket in buckets)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(args.shape, MAX_TOKENS)))
        engine = LLM(
            folder,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            kv_cache_memory_bytes=2 << 30,
            weight_transfer_config={"backend": "torchtitan_grpo"},
            worker_extension_cls=f"{__name__}.{TimedLoading.__name__}",
        )
        rows: list[Row] = []
        for loading in ("vLLM's own", "copies"):
            how = (plan_to_json(buckets), loading == "copies", args.warmup + args.repeats)
            (seconds,) = engine.collective_rpc("time_loading", args=how)
            median = statistics.median(seconds[args.warmup :])
            each = ", ".join(cell(1e3 * value) for value in seconds)
            rows.append({"loading": loading, "update_ms": 1e3 * median, "gb_per_s": size / median / 1e9})
            rows[-1] |= {"updates_ms": each, "shape": args.shape, "bytes": size, "buckets": len(buckets)}
    title = f"Loading Qwen3's {args.shape} shape, {cell(size / 1e9)} GB in {len(buckets)} buckets, inside vLLM"
    out.table(f"{title}: medians of {args.repeats}", COLUMNS, rows)


class TimedLoading:
    """What vLLM adds to its worker (`--worker-extension-cls`)."""

    weight_transfer_engine: Any

    def time_loading(self, plan: list, direct: bool, updates: int) -> list[float]:
        """Seconds of each update, from its start until the device has finished."""
        from torchtitan.grpo.inside_vllm.transfer_engine import UpdateInfo

        engine = self.weight_transfer_engine
        engine._receiver = received = Received(plan_from_json(plan), engine.device)
        engine._direct = DirectLoading(
            engine.model,
            received.buckets,
            engine.model.load_weights,
            engine.device,
            excluded=engine._tied_names(),
            refused="" if direct else "it is being measured",
            say=logger.info,
        )
        seconds = []
        for version in range(updates):
            _finish(engine.device)
            started = time.perf_counter()
            engine.start_weight_update()
            engine.receive_weights(UpdateInfo(version=version))
            engine.finish_weight_update()
            _finish(engine.device)
            seconds.append(time.perf_counter() - started)
        if engine._direct.active is not direct:
            raise RuntimeError("the updates were not loaded as asked; the log says why")
        return seconds


class Received:
    """In place of a `Receiver`. A bucket is whatever lies in the device's memory. Nothing keeps it, as on a wire."""

    def __init__(self, buckets: list[Bucket], device: torch.device):
        self.buckets, self._device = buckets, device

    def receive_buckets(self, info: dict, load: Any, complete: Any) -> None:
        for bucket in self.buckets:
            load(bucket, torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=self._device)[: bucket.payload_bytes])
        complete()

    def close(self) -> None:
        pass


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
