#!/usr/bin/env python3
"""Evaluate a model on held-out prompts, with servers that this script starts and stops.

    python scripts/evaluate.py outputs/quickstart/checkpoint/step-120
    python scripts/evaluate.py models/Qwen3-0.6B --job.config_file run.toml --engine vllm --jsonl data/aime.jsonl

MODEL is a checkpoint, a Hugging Face folder or an id of the hub. Held-out sets, rewards and lengths are those of the
configuration: a checkpoint brings its run's, `--job.config_file` names another. Every other flag is one of the
trainer's, as in `--validation.samples_per_prompt 16 --validation.temperature 0.6`. Results go to result.json,
answers.jsonl and config.toml in a new folder. docs/evaluation.md explains the numbers.

Exit status: 0 done, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 for anything else. The servers are stopped in
each case.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchtitan_overlay  # noqa: F401

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.config.batch import requests_at_once
from torchtitan.grpo.config.hub import fetched, local_folder, named
from torchtitan.grpo.config.machine import raise_file_limit
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.data.load import load_held_out
from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.endpoint.server import serve
from torchtitan.grpo.engines.fleet import Fleet, FleetError
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.registry import ENGINES, make_server
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.evaluation.inputs import check_not_trained_on, checkpoint_of, evaluation_config
from torchtitan.grpo.evaluation.results import RESULT, new_folder, remove_if_empty, table, write_answers, write_result
from torchtitan.grpo.model.hf_config import model_folder
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.stopping import FAILED_S, end_within, run_and_exit, stop_in_time
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.guarded_environment import Environments
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.servers.plan import LOG_FOLDER, run_launches
from torchtitan.grpo.servers.supervisor import Supervisor
from torchtitan.grpo.weight_wire.model_identity import identity_of_folder
from torchtitan.tools.logging import logger


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's arguments, and the trainer's flags."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, help="checkpoint (outputs/x/checkpoint/step-N), folder or hub id")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="servers to start or to use")
    parser.add_argument("--url", action="append", default=[], help="use this server, which has the model's weights")
    parser.add_argument(
        "--server-flags", default="", help='the engine\'s own flags, as --server-flags="--max-num-seqs 64"'
    )
    parser.add_argument("--jsonl", action="append", type=Path, default=[], help="evaluate on all rows of this file")
    parser.add_argument("--out", type=Path, help="folder for the results (default RUN_FOLDER/evaluation/MODEL)")
    return parser.parse_known_args(argv)


@contextlib.contextmanager
def served(config: JobConfig, folder: Path, logs: Path) -> Iterator[list[str]]:
    """Addresses of servers of the model: those of --url, or `[rollout] replicas` that are started, and stopped at the
    end."""
    rollout = config.rollout
    if rollout.urls:
        yield rollout.urls
        return
    starts = run_launches(config, torch.cuda.device_count(), 0, str(folder))
    with Supervisor(starts, logs, logs / "urls.txt", rollout.start_timeout_seconds) as supervisor:
        supervisor.start()
        logger.info(f"Starting {rollout.engine}; its output is in {logs}")
        supervisor.wait_healthy()
        yield supervisor.urls


def answer(
    config: JobConfig,
    urls: list[str],
    sets: list[HeldOut],
    rewards: RewardRunner,
    environments: Environments,
    resources: contextlib.ExitStack,
    out: Path,
) -> tuple[list[HeldOutAnswers], dict[str, str]]:
    """Ask servers that have the model's weights: the scored answers, and each server's software version.

    The answers to a set are written to `out` at once, so those outlive a server that dies later.
    """
    rollout, assets = config.rollout, config.model.hf_assets_path
    tokenizer = load_tokenizer(assets, config.data.chat_template_file)
    end_ids = end_token_ids(tokenizer, assets)
    api_key = os.environ.get(rollout.api_key_env) if rollout.api_key_env else None
    timeouts = config.weight_sync.timeout_seconds, rollout.request_timeout_seconds
    fleet = Fleet(urls, lambda url: make_server(rollout.engine, url, api_key, *timeouts))
    longest = max(len(p.token_ids) + each.max_answer_tokens for each in sets for p in each.prompts)
    for server in fleet.servers:
        server.control.wait_healthy(rollout.start_timeout_seconds)
        server.control.check(longest, end_ids[0], trained=identity_of_folder(assets))
        fleet.admit(server, -1)  # the weights that it was started with
    collector = Collector(
        fleet,
        rewards,
        tokenizer,
        requests_at_once(rollout),
        rollout.request_timeout_seconds,
        environments,
        rollout.group_timeout_seconds,
    )
    resources.callback(collector.close)
    serve(config, collector)
    stop_ids, seed = (*end_ids, *rollout.stop_token_ids), config.debug.seed or 0
    params = SamplingParams(1, 0.0, rollout.max_answer_tokens, stop_ids, seed, stop=tuple(rollout.stop))
    software = {server.url: server.control.software_version() for server in fleet.servers}
    answers: list[HeldOutAnswers] = []
    for each in sets:
        (own,) = answer_held_out(collector, [each], params)
        write_answers(out, own, config)
        answers.append(own)
    return answers, software


def evaluate(arguments: argparse.Namespace, flags: list[str], resources: contextlib.ExitStack) -> None:
    model = local_folder("MODEL", str(arguments.model))
    folder = model_folder(Path(model))
    config = evaluation_config(flags, folder, arguments.engine, arguments.url, arguments.server_flags, arguments.jsonl)
    config = fetched(config)
    tokenizer = load_tokenizer(str(folder), config.data.chat_template_file)
    environments = resources.enter_context(loaded_environments(config))
    sets = load_held_out(config, tokenizer, rows=environments.rows)
    check_not_trained_on(config, sets, folder, tokenizer)
    name = (checkpoint_of(folder) or arguments.model.resolve()).name
    out = new_folder(arguments.out or Path(config.job.dump_folder) / "evaluation" / name)
    resources.callback(remove_if_empty, out)
    rewards = resources.enter_context(RewardRunner(config.reward, config.rollout, folder=str(out)))
    conversations = any(not environments.answering(each.name).is_single_turn for each in sets)
    rewards.check([p for each in sets for p in each.prompts[:2]], refuse=not conversations)
    began = time.time()
    urls = resources.enter_context(served(config, folder, out / LOG_FOLDER))
    answers, software = answer(config, urls, sets, rewards, environments, resources, out)
    check_failures([group for each in answers for group in each.groups], config.reward.max_failed_fraction)
    about = {
        "model": named(model),
        "engine": arguments.engine,
        "servers": software,
        "seed": config.debug.seed,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began)),
        "seconds": round(time.time() - began, 1),
    }
    print(table(write_result(out, answers, config, about)))
    print(f"\n{out / RESULT}")


def main(argv: list[str]) -> int:
    arguments, flags = parse_arguments(argv)
    init_log_lines()
    stop_in_time()
    raise_file_limit()
    try:
        with contextlib.ExitStack() as resources:
            try:
                evaluate(arguments, flags, resources)
            finally:
                end_within(FAILED_S)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (EngineError, FleetError) as error:
        print(f"error: {error}; there is no result, answers.jsonl has the sets before", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
