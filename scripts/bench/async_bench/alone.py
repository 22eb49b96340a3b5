"""The servers' generation alone, one server after another in turns: what a server's flags cost."""

import argparse
import asyncio
import random
import statistics
from types import SimpleNamespace

from async_bench.generation import Ask, generation_rate, under_way
from async_bench.long_tail import draw_lengths
from bench_common.output import Output, Row

from torchtitan.grpo.model.source import resolve_model

PROMPTS = 600
SAMPLES = 16
"""Answers to each prompt, so that servers have prompts in their caches as in training."""


def asks_of(args: argparse.Namespace, vocab_size: int) -> list[Ask]:
    """Random prompts, each with answers of log-normal lengths."""
    draw = random.Random(0)
    prompts = [[draw.randrange(10, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(PROMPTS)]
    lengths = (draw_lengths(i, SAMPLES, args.mean, args.sigma, args.max_answer) for i in range(PROMPTS))
    return [Ask(ids, tokens, ()) for ids, own in zip(prompts, lengths, strict=True) for tokens in own]


def measure_alone(args: argparse.Namespace, out: Output) -> None:
    """`rollouts.py generation`: each server's rate in each round, and a table."""
    folder = SimpleNamespace(flavor="", hf_assets_path=str(args.model), weights="hf")
    asks = asks_of(args, resolve_model(folder, args.prompt_tokens + args.max_answer).model_args.vocab_size)
    rates: dict[str, list[float]] = {server: [] for server in args.servers}
    part = 0
    for turn in range(args.rounds):
        for server in args.servers:
            # Other prompts each time: a server's cache has those of the last time.
            part = (part + len(asks) // 7) % len(asks)
            own = asks[part:] + asks[:part]
            rate = asyncio.run(
                generation_rate(
                    args.engine,
                    [server],
                    own,
                    args.sequences,
                    args.count_s / 3,
                    args.count_s,
                    args.count_s * 10,
                    under_way(own, args.sequences, turn),
                    ignore_eos=True,
                )
            )
            rates[server].append(rate)
            out.say(f"round {turn + 1}, {server}: {rate:,.0f} tokens/s")
    base = statistics.median(rates[args.servers[0]])
    rows: list[Row] = [
        {
            "server": server,
            "tokens_per_s": statistics.median(found),
            "least": min(found),
            "most": max(found),
            "ratio": statistics.median(found) / base,
        }
        for server, found in rates.items()
    ]
    out.table(f"{args.sequences} answers at once, medians", "server tokens_per_s least most ratio", rows)
