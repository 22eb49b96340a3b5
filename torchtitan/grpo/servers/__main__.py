"""python -m torchtitan.grpo.servers MODEL --urls_file FILE: keep servers alive for a trainer that runs elsewhere.

The trainer names FILE, or a copy of it, in [rollout] urls_file. Flags after `--` go to the engine.
"""

import argparse
import math
import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path

from torchtitan.grpo.config.hub import local_folder
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.addresses import UNSENDABLE, is_sendable
from torchtitan.grpo.process.folder_lock import only_run_in
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.server_commands.command import ServerCommand, ServerCommandError, check_exposure
from torchtitan.grpo.process.server_commands.table import COMMANDS
from torchtitan.grpo.process.stopping import run_and_exit
from torchtitan.grpo.servers.plan import LOG_FOLDER, launches
from torchtitan.grpo.servers.ports import ReservedPort
from torchtitan.grpo.servers.supervisor import CLOSE_S, Supervisor, make_log_folder


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    end = argv.index("--") if "--" in argv else len(argv)
    summary, _, more = __doc__.partition(": ")[2].partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.grpo.servers", description=f"{summary}\n\n{more}", allow_abbrev=False
    )
    parser.add_argument("model", help="folder with config.json, a tokenizer and weights, or an id of the hub")
    parser.add_argument("--engine", choices=list(COMMANDS), required=True)
    parser.add_argument("--replicas", type=int, default=1, help="number of servers")
    parser.add_argument("--urls_file", type=Path, required=True, help="list of their addresses, which this writes")
    parser.add_argument("--log_folder", type=Path, help="folder for their logs; default: servers, beside the list")
    parser.add_argument("--gpus_per_server", type=int, default=1, help="several: tensor parallelism")
    parser.add_argument("--first_gpu", type=int, default=0, help="GPU of the first server; the others have the next")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--start_timeout_seconds", type=float, default=300.0, help="longest wait for health")
    parser.add_argument("--host", default="127.0.0.1", help="address that trainers reach; beyond loopback add --expose")
    parser.add_argument("--expose", action="store_true", help="let other machines reach the servers")
    parser.add_argument("--api_key_env", default="", help="variable with the API key that servers ask for")
    arguments = parser.parse_args(argv[:end])
    if arguments.replicas < 1 or arguments.gpus_per_server < 1 or arguments.first_gpu < 0:
        parser.error("--replicas and --gpus_per_server must be at least 1, --first_gpu at least 0")
    if not 0 < arguments.start_timeout_seconds < math.inf:
        parser.error("--start_timeout_seconds must be over 0")
    if COMMANDS[arguments.engine].bundled and arguments.gpus_per_server > 1:
        parser.error(f"--gpus_per_server {arguments.gpus_per_server}: {arguments.engine} runs on one device")
    if arguments.host in ("", "0.0.0.0", "::"):
        parser.error(f"--host {arguments.host!r} is no address that a trainer can use: name this machine's own")
    if arguments.urls_file.is_dir():  # of "", too
        parser.error(f"--urls_file {arguments.urls_file} is a folder: name the file to write")
    if arguments.api_key_env and not os.environ.get(arguments.api_key_env):
        parser.error(f"--api_key_env: the environment variable {arguments.api_key_env} is not set")
    if not is_sendable(os.environ.get(arguments.api_key_env, "")):
        parser.error(f"--api_key_env: the environment variable {arguments.api_key_env} {UNSENDABLE}")
    try:
        check_exposure(arguments.host, arguments.expose, "Give --api_key_env")
    except ServerCommandError as error:
        parser.error(str(error))
    arguments.flags = argv[end + 1 :]
    for flag in arguments.flags:  # --host would open a server to other machines without --expose
        name = flag.partition("=")[0].replace("_", "-")
        if name in COMMANDS[arguments.engine].own_flags:
            parser.error(f"{name} after -- is what this command sets: leave it out")
    return arguments


def planned(arguments: argparse.Namespace) -> list[ServerCommand]:
    each = 0 if arguments.cpu else arguments.gpus_per_server
    return [
        COMMANDS[arguments.engine](
            os.path.abspath(arguments.model),
            tuple(range(arguments.first_gpu + i * each, arguments.first_gpu + (i + 1) * each)),
            tuple(arguments.flags),
            host=arguments.host,
            key_env=arguments.api_key_env,
        )
        for i in range(arguments.replicas)
    ]


def main(argv: list[str]) -> int:
    init_log_lines()
    arguments = parse_arguments(argv)
    listed = arguments.urls_file
    arguments.log_folder = arguments.log_folder or listed.parent / LOG_FOLDER
    try:
        launches(planned(arguments))  # what is missing or cannot be written costs no download
        ReservedPort(arguments.host).close()
        make_log_folder(arguments.log_folder)
        with only_run_in(listed.parent, CLOSE_S, "--urls_file", listed.name):
            _keep_servers(arguments)
    except (UserError, ServerCommandError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _keep_servers(arguments: argparse.Namespace) -> None:
    stop = threading.Event()
    arguments.model = local_folder("MODEL", arguments.model)
    if not os.path.isfile(os.path.join(arguments.model, "config.json")):
        raise UserError(f"{arguments.model} has no config.json: name a Hugging Face model folder")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    supervisor = Supervisor(
        launches(planned(arguments)),
        arguments.log_folder,
        arguments.urls_file,
        arguments.start_timeout_seconds,
        arguments.host,
        "--start_timeout_seconds",
    )
    with closing(supervisor):
        supervisor.start()
        while not stop.wait(1.0):
            supervisor.check()


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
