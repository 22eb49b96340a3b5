"""Evaluate a model on held-out prompts, with servers that are started and stopped."""

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from torchtitan.config import JobConfig
from torchtitan.grpo.config.hub import TEXTS, fetched, local_folder, named
from torchtitan.grpo.config.machine import raise_file_limit
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.data.load import load_held_out
from torchtitan.grpo.data.tokenizer import end_token_ids, load_tokenizer
from torchtitan.grpo.endpoint.server import serve
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.fleet_view import FleetError
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams
from torchtitan.grpo.engines.registry import make_server
from torchtitan.grpo.environments.load import loaded_environments
from torchtitan.grpo.errors import PlainError, UserError
from torchtitan.grpo.evaluation.inputs import check_not_trained_on, checkpoint_of, evaluation_config
from torchtitan.grpo.evaluation.results import (
    ANSWERS,
    RESULT,
    new_folder,
    remove_if_empty,
    table,
    write_answers,
    write_result,
)
from torchtitan.grpo.model.hf_config import model_folder
from torchtitan.grpo.model.weight_files import INDEX, has_weights
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.process.stopping import FAILED_S, end_within, stop_in_time
from torchtitan.grpo.rewards.failures import check_failures
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.rollouts.collector import Collector
from torchtitan.grpo.rollouts.guarded_environment import Environments
from torchtitan.grpo.rollouts.held_out import answer_held_out
from torchtitan.grpo.servers.plan import LOG_FOLDER, run_launches
from torchtitan.grpo.servers.supervisor import Supervisor
from torchtitan.grpo.weight_wire.model_identity import identity_of_folder
from torchtitan.tools.logging import logger


@contextlib.contextmanager
def served(config: JobConfig, folder: Path, logs: Path) -> Iterator[list[str]]:
    """Addresses of servers of the model: those of --url, or `[rollout] replicas` that are started, and stopped at the
    end."""
    rollout = config.rollout
    if rollout.urls:
        yield rollout.urls
        return
    starts = run_launches(config, torch.cuda.device_count(), 0, str(folder))
    supervisor = Supervisor(starts, logs, logs / "urls.txt", rollout.start_timeout_seconds)
    with contextlib.closing(supervisor):
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
    collector = Collector(fleet, rewards, tokenizer, rollout, environments)
    resources.callback(collector.close)
    serve(config, collector)
    stop_ids, seed = (*end_ids, *rollout.stop_token_ids), config.debug.seed or 0
    cuts = {"top_k": rollout.top_k, "min_p": rollout.min_p}
    params = SamplingParams(1, 0.0, rollout.max_answer_tokens, stop_ids, seed, stop=tuple(rollout.stop), **cuts)
    software = {server.url: server.control.software_version() for server in fleet.servers}
    answers: list[HeldOutAnswers] = []
    for each in sets:
        (own,) = answer_held_out(collector, [each], params)
        write_answers(out, own, config)
        answers.append(own)
    return answers, software


def evaluate(arguments: Namespace, resources: contextlib.ExitStack) -> None:
    model = local_folder("MODEL", str(arguments.model), files=TEXTS)
    folder = model_folder(Path(model))
    servers = arguments.engine, arguments.url, arguments.server_flags
    config = evaluation_config(arguments.flags, folder, *servers, arguments.jsonl)
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
    if model != str(arguments.model) and not config.rollout.urls:
        local_folder("MODEL", named(model))  # of the hub: its weights, once all else is checked
    if COMMANDS[arguments.engine].bundled and not (config.rollout.urls or has_weights(folder)):
        # Such a server waits for a trainer's, with random ones. The other engines do not start.
        raise UserError(f"{folder} has neither model.safetensors nor {INDEX}: give a folder with weights")
    began = time.time()
    try:
        urls = resources.enter_context(served(config, folder, out / LOG_FOLDER))
        answers, software = answer(config, urls, sets, rewards, environments, resources, out)
    except (EngineError, FleetError) as error:
        kept = f"; there is no result, {out / ANSWERS} has the sets before" if (out / ANSWERS).exists() else ""
        raise PlainError(f"{error}{kept}") from error
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


def main(arguments: Namespace) -> int:
    init_log_lines()
    stop_in_time()
    raise_file_limit()
    with contextlib.ExitStack() as resources:
        try:
            evaluate(arguments, resources)
        finally:
            end_within(FAILED_S)
    return 0
