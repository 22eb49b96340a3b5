#!/usr/bin/env python3
"""Evaluate a model on held-out prompts, with a server that this script starts and stops.

    python scripts/evaluate.py outputs/quickstart/checkpoint/step-150 --job.config_file train_configs/quickstart.toml
    python scripts/evaluate.py models/Qwen3-0.6B --job.config_file run.toml --engine vllm --jsonl data/aime.jsonl

MODEL is a checkpoint or a Hugging Face folder. Held-out sets, rewards and lengths are those of the configuration: every
other flag is one of the trainer's, as in `--validation.samples_per_prompt 16 --validation.temperature 0.6`. Results go
to result.json, answers.jsonl and config.toml in a new folder. docs/evaluation.md explains the numbers.

Exit status: 0 done, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 for anything else. The server is stopped in
each case.
"""

import argparse
import contextlib
import copy
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

import torchtitan_overlay  # noqa: E402, F401
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.grpo.checkpoint.run_config import RUN_CONFIG  # noqa: E402
from torchtitan.grpo.config.contradictions import check_contradictions  # noqa: E402
from torchtitan.grpo.config.load import load_config  # noqa: E402
from torchtitan.grpo.config.machine import raise_file_limit  # noqa: E402
from torchtitan.grpo.config.resolved import resolved, toml_lines  # noqa: E402
from torchtitan.grpo.config.tables import fill_tables, held_out_set, held_out_sets, training_sources  # noqa: E402
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers  # noqa: E402
from torchtitan.grpo.data.load import load_held_out, load_training  # noqa: E402
from torchtitan.grpo.data.prompts import end_token_ids, load_tokenizer  # noqa: E402
from torchtitan.grpo.data.sources import question  # noqa: E402
from torchtitan.grpo.engines.embedded.spawn import EmbeddedServer, choose_device  # noqa: E402
from torchtitan.grpo.engines.fleet import Fleet, FleetError  # noqa: E402
from torchtitan.grpo.engines.protocol import EngineError, SamplingParams  # noqa: E402
from torchtitan.grpo.engines.registry import ENGINES, make_server  # noqa: E402
from torchtitan.grpo.errors import UserError  # noqa: E402
from torchtitan.grpo.log_lines import init_log_lines  # noqa: E402
from torchtitan.grpo.model_identity import identity_of_folder  # noqa: E402
from torchtitan.grpo.reporting.estimates import estimates, final_answer, is_right  # noqa: E402
from torchtitan.grpo.rewards.failures import check_failures  # noqa: E402
from torchtitan.grpo.rewards.runner import RewardRunner  # noqa: E402
from torchtitan.grpo.rollouts.collector import Collector  # noqa: E402
from torchtitan.grpo.rollouts.environment import load_environment  # noqa: E402
from torchtitan.grpo.rollouts.held_out import answer_held_out  # noqa: E402
from torchtitan.grpo.stopping import end_within, run_and_exit, stop_in_time  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

TRAINER_ONLY = {
    "parallelism.data_parallel_replicate_degree": "1",
    "parallelism.data_parallel_shard_degree": "-1",
    "parallelism.tensor_parallel_degree": "1",
    "compile.enable": "false",
    "activation_checkpoint.mode": "none",
    "weight_sync.transport": "auto",
    "weight_sync.disk_folder": "",
    "rollout.min_servers": "1",
    "rollout.urls_file": "",
    "rollout.replicas": "0",
    "rollout.gpus_per_server": "1",
    "rollout.server_python": "",
    "rollout.server_flags": "",
}
"""Keys about the trainer's processes and servers, which an evaluation has not, and values that ask for nothing."""
STOP_S = 15.0
"""How long a server may take to stop before it is killed."""
GUARD = f"""
exec 3<&0
trap : TERM  # it is the server's
"$@" < /dev/null 3<&- &
server=$!
(trap '' TERM; exec > /dev/null 2>&1; read -r -u 3; kill -TERM 0; sleep {STOP_S:g} 3<&-; kill -KILL 0) &
wait $server
status=$?
while kill -0 $server 2> /dev/null; do wait $server; status=$?; done
exit $status
"""
"""Runs a server in this process group, and ends the group when stdin ends: this script may be killed."""
PACKAGES = ("torchtitan-grpo", "torchtitan", "torch", "transformers", "math-verify", "reasoning-gym")


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's arguments, and the trainer's flags."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, help="checkpoint (outputs/x/checkpoint/step-N) or Hugging Face folder")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="server to start or to use")
    parser.add_argument("--url", action="append", default=[], help="use this server, which has the model's weights")
    parser.add_argument("--server-flags", default="", help='flags for scripts/serve_ENGINE.sh, as "--gpu 1"')
    parser.add_argument("--jsonl", action="append", type=Path, default=[], help="evaluate on all rows of this file")
    parser.add_argument("--out", type=Path, help="folder for the results (default DUMP_FOLDER/evaluation/MODEL)")
    return parser.parse_known_args(argv)


def model_folder(path: Path) -> Path:
    """The Hugging Face folder of a checkpoint, or `path` itself if it is one."""
    for folder in (path / "hf", path):
        if (folder / "config.json").is_file():
            return folder
    raise UserError(
        f"{path} is no Hugging Face folder, and holds none as hf/: give a checkpoint of a run with [checkpoint] "
        "export_hf, or a folder with config.json, weights and tokenizer"
    )


def read_config(arguments: argparse.Namespace, flags: list[str], folder: Path) -> JobConfig:
    """The run's configuration, with this model and server, and without what only a trainer needs.

    Raises:
        UserError: It is wrong, or the run trains on the rows that would be evaluated.
    """
    given = {"model.hf_assets_path": str(folder), "rollout.engine": arguments.engine}
    if arguments.engine != "embedded" and not arguments.url:
        arguments.server_port = free_port()
        given["rollout.urls"] = f"http://127.0.0.1:{arguments.server_port}"
    else:
        given["rollout.urls"] = ",".join(arguments.url)
    named = {flag.lstrip("-").partition("=")[0] for flag in flags if flag.startswith("--")}
    own = given | {key: value for key, value in TRAINER_ONLY.items() if key not in named}
    config = load_config([*(f"--{key}={value}" for key, value in own.items()), *flags])
    if arguments.jsonl:
        config.validation.sets = [
            held_out_set(config, {"name": _name(path), "source": "jsonl", "path": str(path), "prompts": 2**20})
            for path in arguments.jsonl
        ]
        if problems := check_contradictions(config):
            raise UserError("\n  - ".join(["the configuration does not fit --jsonl:", *problems]))
    trained_on = [
        each
        for each in held_out_sets(config)
        if not (each.own_rows or each.data.validation_path or each.data.validation_split)
    ]
    if trained_on and not config.validation.enable:
        raise UserError(
            "[validation] enable = false: such a run holds no rows of its training data out, so it has trained on "
            "those that would be asked. Name others by --jsonl, [[validation.sets]] or [data] validation_split; add "
            "--validation.enable if this model was not trained on them"
        )
    config.validation.enable = True
    return config


def check_not_trained_on(
    config: JobConfig, sets: list[HeldOut], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Hold what would be asked against what a checkpoint's own run trained on.

    A run holds the last `[validation] prompts` rows out. Another number or size asks rows that it has trained on. Sets
    with rows of their own may be anything.

    Raises:
        UserError: A set of held-out rows asks what the run trained on.
    """
    saved = folder.parent / RUN_CONFIG
    values = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
    own = {path: value for path, value in values.items() if path.startswith(("data.", "validation."))}
    tables = zip(sets, held_out_sets(config), strict=True)
    asks = [(each, table.data.prompt_column) for each, table in tables if not table.own_rows]
    now = resolved(config)
    if not asks or all(now[path] == value for path, value in own.items() if path in now):
        return
    run = copy.deepcopy(config)
    for path, value in own.items():
        section, _, name = path.partition(".")
        if path in now:
            setattr(getattr(run, section), name, value)
    try:
        fill_tables(run)
        trained = load_training(run, tokenizer, load_held_out(run, tokenizer) if run.validation.enable else [])
    except UserError as error:
        logger.warning(f"Not checked whether this checkpoint's run trained on what is asked: {error}")
        return
    columns = {source.data.prompt_column for source in training_sources(run)}
    known = {question(prompt.columns, column) for prompt in trained.first(len(trained)) for column in columns}
    for each, column in asks:
        repeated = sum(question(prompt.columns, column) in known for prompt in each.prompts)
        if repeated:
            name = f" of set {each.name!r}" if each.name else ""
            raise UserError(
                f"{repeated} of the {len(each.prompts)} held-out prompts{name} are some that this checkpoint's run "
                f"trained on: it held out [validation] prompts = {run.validation.prompts}"
                f"{'' if run.validation.enable else ', and enable = false'}. Restore the [data] and [validation] keys "
                f"of {saved}, or name other rows by --jsonl or [[validation.sets]]"
            )


def _name(path: Path) -> str:
    return re.sub(r"[^\w.-]", "_", path.stem, flags=re.ASCII)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def new_folder(wanted: Path) -> Path:
    """`wanted`, or with the first number that is free: results are never overwritten."""
    for number in range(1, 10**6):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise UserError(f"{wanted}: too many results with this name: give another --out")


@contextlib.contextmanager
def served(config: JobConfig, arguments: argparse.Namespace, folder: Path, log: Path) -> Iterator[list[str]]:
    """Addresses of servers of the model: those of --url, or one that is started, and stopped in the end."""
    rollout = config.rollout
    if arguments.url:
        yield rollout.urls
    elif arguments.engine == "embedded":
        trainer = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device, _ = choose_device(rollout.embedded_device, trainer, trainers_here=0)
        with EmbeddedServer() as server:
            yield [server.start(folder, rollout, device, log)]
    else:
        script = REPOSITORY / "scripts" / f"serve_{arguments.engine}.sh"
        command = ["bash", str(script), str(folder), "--port", str(arguments.server_port)]
        command += [] if torch.cuda.is_available() else ["--cpu"]
        command += shlex.split(arguments.server_flags)
        with log.open("wb") as output:  # a group of its own: Ctrl-C reaches this script alone
            process = subprocess.Popen(
                ["bash", "-c", GUARD, "guard", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            control = ENGINES[arguments.engine].control(rollout.urls[0])
            print(f"starting {arguments.engine}, its output is in {log}", file=sys.stderr)
            try:
                control.wait_healthy(rollout.start_timeout_seconds, process)
            except Exception as error:
                tail = log.read_text(errors="replace")[-2000:]
                raise UserError(
                    f"{arguments.engine} does not serve {folder}: {error}\n{log} ends with:\n{tail}"
                ) from error
            yield rollout.urls
        finally:
            stop_group(process)


def stop_group(process: subprocess.Popen) -> None:
    """End a server with its workers, which are children of `process`: SIGTERM, and SIGKILL after STOP_S."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def answer(
    config: JobConfig,
    urls: list[str],
    sets: list[HeldOut],
    rewards: RewardRunner,
    resources: contextlib.ExitStack,
    path: Path,
) -> tuple[list[HeldOutAnswers], dict[str, str]]:
    """Ask servers that have the model's weights: the scored answers, and each server's software version.

    The answers to a set are written to `path` at once, so those outlive a server that dies later.
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
        rollout.max_concurrent_requests,
        rollout.request_timeout_seconds,
        load_environment(rollout.environment),
        rollout.environment,
        rollout.group_timeout_seconds,
    )
    resources.callback(collector.close)
    stop = (*end_ids, *rollout.stop_token_ids)
    params = SamplingParams(1, 0.0, rollout.max_answer_tokens, stop, config.debug.seed or 0)
    software = {server.url: server.control.software_version() for server in fleet.servers}
    answers: list[HeldOutAnswers] = []
    for each in sets:
        own = answer_held_out(collector, [each], params)
        write_answers(path, own, config)
        answers += own
    return answers, software


def write_answers(path: Path, answers: list[HeldOutAnswers], config: JobConfig) -> None:
    """Append them to a JSONL file."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for of_set in answers:
            for kind, groups in (("greedy", of_set.greedy), ("sampled", of_set.sampled)):
                for sample in (sample for group in groups for sample in group):
                    record = {
                        "set": of_set.held_out.name,
                        "kind": kind,
                        "prompt_index": sample.prompt.index,
                        "prompt": sample.prompt.text,
                        "answer": sample.text,
                        "final_answer": final_answer(sample, config.reward),
                        "reference": sample.prompt.answer,
                        "reward": sample.reward,
                        "rewards": sample.rewards,
                        "reward_failures": sample.reward_failures,
                        "right": is_right(sample, config.reward),
                        "finish_reason": sample.finish_reason,
                        "answer_tokens": len(sample.token_ids),
                    }
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")


def set_result(answers: HeldOutAnswers, config: JobConfig) -> dict[str, Any]:
    held_out = answers.held_out
    samples = [sample for group in answers.groups for sample in group]
    return {
        "prompts": len(held_out.prompts),
        "samples_per_prompt": held_out.samples,
        "temperature": held_out.temperature,
        "top_p": held_out.top_p,
        "min_p": held_out.min_p,
        "max_answer_tokens": held_out.max_answer_tokens,
        "truncated_answers": sum(sample.finish_reason == "length" for sample in samples),
        "failed_scores": sum(len(sample.reward_failures) for sample in samples),
        "metrics": {name: estimate._asdict() for name, estimate in estimates(answers, config.reward).items()},
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def print_table(result: dict[str, Any]) -> None:
    rows = [("set", "prompts", "metric", "mean", "standard error")]
    for name, of_set in result["sets"].items():
        for metric, estimate in of_set["metrics"].items():
            error = estimate["standard_error"]
            error = "-" if error is None else f"{error:.4f}"
            rows.append((name, str(of_set["prompts"]), metric, f"{estimate['mean']:.4f}", error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if i in (1, 3, 4) else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def evaluate(arguments: argparse.Namespace, flags: list[str], resources: contextlib.ExitStack) -> None:
    folder = model_folder(arguments.model)
    config = read_config(arguments, flags, folder)
    tokenizer = load_tokenizer(str(folder), config.data.chat_template_file)
    sets = load_held_out(config, tokenizer)
    check_not_trained_on(config, sets, folder, tokenizer)
    rewards = resources.enter_context(RewardRunner(config.reward, config.rollout.api_key_env))
    rewards.check([p for each in sets for p in each.prompts[:2]], refuse=not config.rollout.environment)
    out = new_folder(arguments.out or Path(config.job.dump_folder) / "evaluation" / arguments.model.resolve().name)
    began = time.time()
    urls = resources.enter_context(served(config, arguments, folder, out / "server.log"))
    answers, software = answer(config, urls, sets, rewards, resources, out / "answers.jsonl")
    check_failures([group for each in answers for group in each.groups], config.reward.max_failed_fraction)
    result = {
        "model": str(arguments.model),
        "engine": arguments.engine,
        "servers": software,
        "seed": config.debug.seed,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began)),
        "seconds": round(time.time() - began, 1),
        "sets": {each.held_out.name or "held-out": set_result(each, config) for each in answers},
        "answers": "answers.jsonl",
        "versions": versions(),
        "config": "config.toml",
    }
    (out / "config.toml").write_text("\n".join(toml_lines(config)).strip() + "\n")
    unfinished = out / "result.json.tmp"
    unfinished.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    unfinished.rename(out / "result.json")
    print_table(result)
    print(f"\n{out / 'result.json'}")


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
                end_within(2 * STOP_S)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (EngineError, FleetError) as error:
        print(f"error: {error}; there is no result, answers.jsonl has the sets before", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the server is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
