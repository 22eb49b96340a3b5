#!/usr/bin/env python3
"""Measure weight sync: how fast a version reaches the servers, and what the trainer notices of it.

    refit       whole blocking publishes from FSDP2 shards, phase by phase, and raw broadcasts of as many bytes
    vllm-nccl   the same bytes by vLLM's own NCCL weight transfer, for comparison
    exposed     a training loop without weight sync, with blocking and with background weight sync, and with faults
    scale       what publish and a push cost against 1 to 256 servers, on CPU
    receiver    servers without a model, to send to by hand

`SUBCOMMAND --help` says what each measures and how to run it. Results are markdown on stdout, and with --json FILE one
JSON object a line, appended. Everything waits for at most --timeout-s; after --time-limit-s the process ends with a
traceback. Processes that it starts end with it, however it ends.
"""

import argparse
import faulthandler
import os
import signal
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from bench_common.arguments import address, device, positive, seconds

SHAPES = ["tiny", "0.6b", "1.7b", "4b", "8b"]

REFIT = """Time of a whole refit: FSDP2 shards on 1 to N trainer ranks -> verified, loaded and in service everywhere.

The model has the shape of a Qwen3 and random weights, sharded as grpo_train.py shards it. Each measurement is a
WeightSync of its own (--servers x --bucket-mib x --num-buffers), on which warm-up and then --repeats versions with
changed weights are published with wait=True. A time counts only if every server has acknowledged that version.

  total        wall clock of publish(), rank 0                     pause        pause and start of an update
  snapshot     copy of this rank's shards (device)                 gather       waiting for the other ranks' shards
  pack         assembling and checksumming buckets (device)        wire         first bucket sent to last one received
  apply        last bucket received to last one loaded             acknowledge  finish, version check, resume

Of phases that each server has, the slowest server's is shown; gather and pack run within wire, so phases do not add up.
GB/s: payload over total; wire GB/s: payload over wire. With several servers the default is to time the first alone,
then all of them: the difference is what each further server costs on rank 0's link.

--raw-gpu I adds, after the refits, plain broadcasts of as many bytes from rank 0 to a process on GPU I, in one piece
and in as many pieces as there were buckets. The GPU may be a server's: the process takes as much memory as the payload,
so start vLLM with room left (8b, 16.4 GB: --gpu-memory-utilization 0.7 on an H200).

Two H200s, trainer on GPU 0 and vLLM on GPU 1:

  python scripts/make_tiny_model.py /tmp/qwen3-8b --layers 36 --dim 4096 --ffn-dim 12288 --heads 32 --kv-heads 8 \\
      --head-dim 128 --vocab-size 151936 --max-tokens 2048 --no-tie
  bash scripts/serve_vllm.sh /tmp/qwen3-8b --gpu 1 --port 8001 --load-format dummy --max-model-len 2048 \\
      --gpu-memory-utilization 0.7 &
  torchrun --nproc-per-node 1 scripts/bench/weight_sync.py refit --shape 8b --urls http://127.0.0.1:8001 --raw-gpu 1

0.6b: --layers 28 --dim 1024 --ffn-dim 3072 --heads 16 --kv-heads 8, 1.7b: 28, 2048, 6144, 16, 8, 4b: 36, 2560, 9728,
32, 8, all three tied. Without vLLM: --receivers 1 starts a process on GPU 1 that receives and checks only. On a CPU:
--shape tiny --receivers cpu cpu.
"""

VLLM = """The comparison of `refit`: vLLM's own NCCL engine (packed tensors); whole tensors in one process, no gather.

Needs vLLM 0.25 in this Python, GPU 0 for the sender, and a server on another GPU of this machine whose weight-transfer
engine is vLLM's own (the last flag wins over what the script sets):

  bash scripts/serve_vllm.sh /tmp/qwen3-8b --gpu 1 --port 8002 --load-format dummy --max-model-len 2048 \\
      --weight-transfer-config '{"backend": "nccl"}' &
  CUDA_VISIBLE_DEVICES=0 python scripts/bench/weight_sync.py vllm-nccl --shape 8b --url http://127.0.0.1:8002

Same HTTP calls around the transfer as `refit` (pause with mode=keep and clear_cache=true, start, update, finish,
resume). It neither verifies nor gathers: it is what a blocking push of unsharded weights costs. A tensor larger than
--bucket-mib makes vLLM's buffer as large.
"""

EXPOSED = """What a training loop notices of weight sync.

Forward, backward and optimizer on one packed row of random tokens a rank, with the repository's own model; publish()
after each step. Runs, in one process: no weight sync; blocking; background; no weight sync again; background while one
server sleeps --sleep-s in the midst of an update; with --kill, background while a server ends by SIGKILL in the midst
of a broadcast. The last two act on the first of --receivers, after two steps, and last until it has caught up.

  step         median of the steps' wall clock; `step / no sync` and `extra` compare with the mean of the two runs
               without: in the background what is left is the compute and bandwidth that the push itself takes
  exposed      host time of publish() and order_writes_after() in a step, of the slowest rank: median and maximum
  push         median of the whole push, which in the background is hidden
  skipped      versions that a newer one overtook: a push took longer than a step

Targets: at most 5 ms exposed in every background run, and steps at most 1.03 times as long as without.

Parameters are float32 unless they, gradients, optimizer state and snapshots exceed four fifths of the GPUs' memory
(8b with AdamW on one H200): then bfloat16, and the table says so.

  torchrun --nproc-per-node 1 scripts/bench/weight_sync.py exposed --shape 8b --urls http://127.0.0.1:8001 \\
      --receivers 1 --kill
  torchrun --nproc-per-node 1 scripts/bench/weight_sync.py exposed --shape tiny --tokens 256 --document-tokens 64 \\
      --receivers cpu cpu --sleep-s 3 --kill                                        (on a CPU)
"""

SCALE = """What publish() and a push cost the trainer against more and more servers; CPU only, no GPU needed.

One rank, a small model, real receivers without a model behind real routes over loopback, in --processes processes.
For each of --counts: connect; then --repeats versions, each published in the background and drained.

  publish      host time of publish(): median and maximum       push           wall clock of the whole push
  trainer CPU  CPU seconds of this process in a push             threads        most seen while pushes were under way

Servers and trainer share this machine's cores, so with many servers a push shows what the whole machine can do: the
lines under the table say how each quantity grows. --plot FILE.png draws it.
"""

RECEIVER = """Servers that receive and check weights and have no model, each on its own port; prints their addresses.

They answer the routes that weight sync uses. A fault, at start by --sleep-s or at any time by
`POST /fault {"sleep_s": 10, "version": 7, "updates": 1}` or `{"kill": true}`, strikes while the first bucket of an
update is being loaded: it sleeps, or ends the whole process with SIGKILL. Without "version" the next update is meant,
"updates" says how many (-1: all), {} ends it.
"""


def build_parser() -> argparse.ArgumentParser:
    formatter = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="append the tables' rows as JSON lines")
    common.add_argument("--timeout-s", type=seconds, default=60.0, help="longest wait for one thing (default 60)")
    common.add_argument("--time-limit-s", type=seconds, default=1800.0, help="longest run of all (default 1800)")
    common.add_argument("--warmup", type=positive, default=2, help="versions or steps before measuring (default 2)")
    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--shape", choices=SHAPES, default="0.6b", help="of a Qwen3 (default 0.6b); tiny: for a CPU")
    trainer = argparse.ArgumentParser(add_help=False)
    trainer.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the trainer")
    trainer.add_argument("--param-dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the model")
    trainer.add_argument(
        "--transport", choices=["auto", "nccl", "gloo"], default="auto", help="[weight_sync] transport"
    )
    trainer.add_argument("--urls", nargs="+", type=address, default=[], metavar="URL", help="servers that are running")
    trainer.add_argument(
        "--receivers",
        nargs="+",
        type=device,
        default=[],
        metavar="GPU",
        help="start one receiver process on each of these devices: indices of GPUs (as nvidia-smi has them), or cpu",
    )

    refit = commands.add_parser("refit", parents=[common, shape, trainer], description=REFIT, **formatter)
    refit.add_argument("--num-buffers", nargs="+", type=positive, default=[2, 1, 4], help="default 2 1 4")
    refit.add_argument("--bucket-mib", nargs="+", type=positive, default=[1024], help="cap on a bucket (default 1024)")
    refit.add_argument("--servers", nargs="+", type=positive, help="time with this many (default: 1, and all)")
    refit.add_argument("--repeats", type=positive, default=5, help="default 5")
    refit.add_argument(
        "--raw-gpu", type=int, metavar="I", help="GPU of the raw broadcasts' receiver; any number on CPU"
    )

    vllm = commands.add_parser("vllm-nccl", parents=[common, shape], description=VLLM, **formatter)
    vllm.add_argument("--url", required=True, type=address, help="the server, on this machine")
    vllm.add_argument("--num-buffers", nargs="+", type=positive, default=[2], help="packed_num_buffers (default 2)")
    vllm.add_argument("--bucket-mib", nargs="+", type=positive, default=[1024], help="one buffer (default 1024)")
    vllm.add_argument("--repeats", type=positive, default=5, help="default 5")

    exposed = commands.add_parser("exposed", parents=[common, shape, trainer], description=EXPOSED, **formatter)
    exposed.add_argument("--steps", type=positive, default=20, help="of each run (default 20)")
    exposed.add_argument("--tokens", type=positive, default=16384, help="of one rank's row (default 16384)")
    exposed.add_argument("--document-tokens", type=positive, default=2048, help="default 2048")
    exposed.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="default adamw")
    exposed.add_argument("--ac", choices=["none", "selective", "full"], default="full", help="activation checkpointing")
    exposed.add_argument("--compile", action="store_true", help="compile the model's blocks")
    exposed.add_argument("--num-buffers", type=positive, default=2, help="default 2")
    exposed.add_argument("--bucket-mib", type=positive, default=1024, help="cap on a bucket (default 1024)")
    exposed.add_argument("--sleep-s", type=float, default=10.0, help="of the slow server; 0: leave it out (default 10)")
    exposed.add_argument("--straggler-s", type=seconds, default=1.0, help="[weight_sync] straggler_seconds (default 1)")
    exposed.add_argument("--kill", action="store_true", help="also end the first of --receivers by SIGKILL")

    scale = commands.add_parser("scale", parents=[common], description=SCALE, **formatter)
    scale.add_argument(
        "--counts", nargs="+", type=positive, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="of servers"
    )
    scale.add_argument("--processes", type=positive, default=2, help="that hold the servers (default 2)")
    scale.add_argument("--repeats", type=positive, default=10, help="default 10")
    scale.add_argument("--num-buffers", type=positive, default=2, help="default 2")
    scale.add_argument("--bucket-mib", type=positive, default=1, help="cap on a bucket (default 1: four buckets)")
    scale.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    scale.set_defaults(device="cpu", shape="tiny")

    receiver = commands.add_parser("receiver", description=RECEIVER, **formatter)
    receiver.add_argument("--servers", type=positive, default=1, help="how many (default 1)")
    receiver.add_argument("--device", default="cpu", help="cpu or cuda:N (default cpu)")
    receiver.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; the routes have no password")
    receiver.add_argument("--port", type=int, default=0, help="of the first server, the others follow (default: any)")
    receiver.add_argument("--ready-file", type=Path, help="write the addresses here, too, once they answer")
    receiver.add_argument("--parent-pid", type=int, help="end with this process, which must be the parent")
    receiver.add_argument("--sleep-s", type=float, default=0.0, help="make a server slow from the start")
    receiver.add_argument("--sleep-server", type=int, default=0, metavar="I", help="which one (default 0)")
    receiver.add_argument("--sleep-version", type=int, metavar="V", help="in this version alone (default: in all)")

    raw = commands.add_parser("raw-receiver", description="Started by `refit --raw-gpu`: the receiving end.")
    raw.add_argument("--port", type=int, required=True)
    raw.add_argument("--bytes", type=positive, required=True)
    raw.add_argument("--backend", choices=["nccl", "gloo"], required=True)
    raw.add_argument("--pieces", nargs="+", type=positive, required=True)
    raw.add_argument("--rounds", type=positive, required=True)
    raw.add_argument("--timeout-s", type=seconds, required=True)
    raw.add_argument("--parent-pid", type=int, required=True)
    raw.add_argument("--device", required=True)
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together; what does not ends the program with exit status 2 and says what to change."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command in ("refit", "exposed") and not args.urls and not args.receivers:
        parser.error(f"{args.command} needs servers: --urls of running ones, or --receivers to start some")
    if args.command == "refit" and args.servers and max(args.servers) > len(args.urls) + len(args.receivers):
        parser.error(
            f"--servers {max(args.servers)}: --urls and --receivers give {len(args.urls) + len(args.receivers)}"
        )
    if args.command == "exposed":
        if args.tokens < args.document_tokens:
            parser.error(f"--tokens {args.tokens} is under --document-tokens {args.document_tokens}")
        if not 2 <= args.document_tokens <= 4096:
            parser.error(f"--document-tokens {args.document_tokens}: 2 to 4096, the length of the models' tables")
        if args.kill and not (args.receivers and len(args.urls) + len(args.receivers) > 1):
            parser.error(
                "--kill ends the first of --receivers: start at least one, and have a second server that stays"
            )
        if args.sleep_s < 0:
            parser.error(f"--sleep-s {args.sleep_s:g} is negative")
    if args.command == "scale" and args.plot and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: no such folder: {args.plot.parent}")
    if args.command == "receiver" and not 0 <= args.sleep_server < args.servers:
        parser.error(f"--sleep-server {args.sleep_server}: there are servers 0 to {args.servers - 1}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # torchrun's stop: let the children be ended
    if args.command not in ("receiver", "raw-receiver"):
        faulthandler.dump_traceback_later(args.time_limit_s, exit=True)
    if getattr(args, "device", "") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torchtitan would take a GPU that it sees
    from torchtitan.grpo.errors import UserError

    try:
        return run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Import what the subcommand needs, which takes seconds, and run it."""
    if args.command == "receiver":
        from weight_sync_bench.receivers import serve

        serve(args)
        return 0
    if args.command == "raw-receiver":
        from weight_sync_bench.baselines import raw_receiver

        raw_receiver(args)
        return 0

    from bench_common.output import Output

    if args.command == "vllm-nccl":
        from weight_sync_bench.baselines import vllm_nccl

        vllm_nccl(args, Output(True, args.json))
        return 0

    from weight_sync_bench.trainer import Ranks

    with ExitStack() as resources:
        ranks = Ranks(args.device, timeout_s=args.time_limit_s)
        resources.callback(ranks.close)
        out = Output(ranks.rank == 0, args.json)
        out.record(
            {"table": "run", "arguments": sys.argv[1:], "ranks": ranks.describe(), "torchtitan": version("torchtitan")}
        )
        if args.command == "refit":
            from weight_sync_bench.refit import refit

            refit(args, ranks, out, resources)
        elif args.command == "exposed":
            from weight_sync_bench.exposed import exposed

            exposed(args, ranks, out, resources)
        else:
            from weight_sync_bench.scale import scale

            scale(args, ranks, out, resources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
