#!/usr/bin/env python3
"""Measure the training step: this trainer's policy update against torchtitan's own pre-training step and others.

Each contender runs in a process of its own, one after another, so that its peak memory is its own:

  torchtitan    torchtitan's pre-training step: train_spec "qwen3", its parallelize_fn, varlen attention, cross-entropy
                over full float32 logits; on one GPU sharded over that one rank. Needs CUDA
  ours          the policy update of grpo_train.py: model, packed rows, GRPO loss and entropy, accumulation, AdamW
  transformers  what a short script does: AutoModelForCausalLM, float32 weights, bfloat16 autocast (on several GPUs
                FSDP2 with that precision), FlashAttention if flash_attn is installed, else SDPA, documents as rows of a
                batch, which have one length and so no padding, log_softmax of full float32 logits; never compiled;
                --ac selective and matmul are full, as it has no other
  trl           the same model with TRL's selective_log_softmax; its trainers are not run. Needs trl
  logprobs      no model: from --tokens hidden states to log-probabilities, by full logits and by token_logprobs (which
                gives the entropy too), forward alone and with backward, eager and compiled
  offload       ours, with a pass of log-probabilities before each step, while the optimizer state is on the device; or
                on the host by blocking copies; or by [offload] offload_optimizer_states_for_logprob; at last with
                optimizer_states = "host". Exposed: over the first. Freed: memory allocated, not reserved

All train the same random tokens in the same microbatches with the same precision, optimizer (AdamW, float32 state,
fused) and clipping, from random weights of their own. A microbatch of --tokens is --tokens / --documents documents of
--documents positions: for torchtitan and transformers the rows of a batch. --prompt-share of each document is a prompt,
which is not trained; 0 leaves one token of it, so that every position is trained, as in pre-training.

  tokens/s/GPU    positions of a step, prompts included, over the median of the steps' times, over GPUs
  MFU %           FLOPs of the products over that time and --peak-tflops. Counted: 6 x parameters of the layers'
                  matrices for each position; 6 x vocabulary x width for each trained token; 12 x layers x heads x
                  head_dim x L^2 / 2 for the causal attention of each document of L positions. Not counted: the
                  embedding's look-up, and what is computed twice (activation checkpointing, recomputed logits).
                  torchtitan itself counts attention at full length, and so finds a higher MFU
  forward + backward, clip + optimizer   medians by CUDA events (on a CPU by the clock); no wait within a step but a
                  contender's own
  peak GiB        tensors allocated at most, after the warm-up, on the rank that needs most; for logprobs: above the
                  inputs
  --dry_run's     what `grpo_train.py --dry_run` counts, less what serves weight sync: beside ours

--json has more: memory reserved, the first step's loss by token (which is about ln(vocabulary) for every contender,
more where tied weights start large), seconds of the warm-up, which hold compilation, and device and versions.

One H200, then two:

  python scripts/bench/step.py --shapes 0.6b 1.7b 4b --json step.jsonl
  python scripts/bench/step.py --shapes 8b --gpus 2 --what torchtitan ours --json step.jsonl

RL's case: --prompt-share 0.3. Where the time of a step goes: --what ours --profile FOLDER. On a CPU, only to see that
it works: --shapes tiny --device cpu --tokens 64 --documents 32. What follows `--` is configuration of grpo_train.py,
for all contenders that read it: `-- --training.reduce_gradients microbatch`.
"""

import argparse
import signal
import sys
from pathlib import Path

from bench_common.arguments import positive, seconds, trainer_flags
from bench_common.shapes import SHAPES

CONTENDERS = ["torchtitan", "ours", "transformers", "trl", "logprobs", "offload"]


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in [0, 1)")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--what", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="default: all")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b"], help="of a Qwen3 (default 0.6b)")
    parser.add_argument("--tokens", type=positive, default=16384, help="of one microbatch (default 16384)")
    parser.add_argument("--documents", type=positive, default=4096, metavar="TOKENS", help="length (default 4096)")
    parser.add_argument("--microbatches", type=positive, default=1, help="of a step and GPU (default 1)")
    parser.add_argument("--prompt-share", type=share, default=0.0, help="of a document, not trained (default 0)")
    parser.add_argument(
        "--ac",
        choices=["auto", "none", "matmul", "selective", "full"],
        default="auto",
        help="activation checkpointing; selective is by operator (default: none for tiny and 0.6b, else selective); "
        "matmul keeps every product, where torchtitan has selective alone",
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the blocks (default: on CUDA)")
    parser.add_argument("--gpus", type=positive, default=1, help="ranks, started by torchrun if over 1 (default 1)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: CUDA if there is")
    parser.add_argument("--steps", type=positive, default=8, help="that are measured (default 8)")
    parser.add_argument("--warmup", type=positive, default=4, help="steps before them (default 4)")
    parser.add_argument("--peak-tflops", type=seconds, default=989.0, help="of one GPU (default 989: bf16 on H200)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default 0)")
    parser.add_argument("--run-limit-s", type=seconds, default=240.0, help="of one contender (default 240)")
    parser.add_argument("--time-limit-s", type=seconds, default=1800.0, help="of all; what does not fit is left out")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="one more step of each: kernels, Chrome trace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append what is found as JSON lines, at once")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw all profiled steps that are in --json's file")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep the contenders' logs (default: nothing is kept)"
    )
    parser.add_argument("--dry", action="store_true", help="say what would be measured, and its arithmetic, and stop")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments that fit together; what does not ends the program with exit status 2 and says what to change."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    args = parser.parse_args(words[:cut])
    args.flags = trainer_flags(words[cut + 1 :], parser)
    args.what = [name for name in CONTENDERS if name in args.what]  # torchtitan first: the others' ratios need it
    if args.documents < 2:
        parser.error(f"--documents {args.documents}: a document needs a prompt and an answer, so 2 or more")
    if args.tokens % args.documents:
        parser.error(f"--tokens {args.tokens} is not a multiple of --documents {args.documents}")
    if args.plot and not args.json:
        parser.error("--plot draws what --json has recorded: name its file")
    if args.profile and set(args.what) <= {"logprobs", "offload"}:
        parser.error("--profile is of training steps: add a contender that has them to --what")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # let the children be ended
    from bench_common.output import Output
    from step_bench.runs import Refused, steps

    out = Output(True, args.json)
    out.record({"table": "arguments", "arguments": sys.argv[1:] if argv is None else argv})
    try:
        return steps(args, out)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
