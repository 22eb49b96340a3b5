"""One server of `[rollout] replicas` inside a Ray actor, under the same supervisor as without Ray."""

import dataclasses
import os
from pathlib import Path

import ray

from torchtitan.grpo.config.hub import fetched
from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.process.server_commands.command import ServerCommandError
from torchtitan.grpo.servers.plan import LOG_FOLDER, launches, planned_servers
from torchtitan.grpo.servers.state import ServerState
from torchtitan.grpo.servers.supervisor import Supervisor

KEPT_FROM_RAY = {"OMP_NUM_THREADS"}
"""Variables that Ray sets in each worker process, and that the driver's value replaces. Here and not in rank.py, whose
imports are a trainer's: they would more than double what a server's actor needs to start."""


class SupervisedServer:
    """The methods are called in threads of the actor.

    Args:
        index: Of the server; it names its log.
        environment: The driver's variables. Those that this process has already stay as they are.
        argv: The command line without the program's name.
        job: What the trainer reads of the configuration.
        folder: The driver's working directory; paths in the configuration are relative to it.
    """

    def __init__(
        self, index: int, environment: dict[str, str], argv: list[str], make: str, job: Job, folder: str
    ) -> None:
        os.environ.update({name: v for name, v in environment.items() if name not in os.environ})
        for name in KEPT_FROM_RAY:
            os.environ.pop(name, None)
            os.environ.update({name: environment[name]} if name in environment else {})
        if gpus := ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self._index, self._folder, self._gpus = index, folder, len(gpus)
        self._config = load_config(argv, job=job)
        self._supervisor: Supervisor | None = None
        self._closing = False
        init_log_lines()

    def serve(self, host: str) -> str:
        """Start the server, which listens on `host`. Does not wait until it serves.

        Returns:
            Why it cannot be started; "" if nothing is wrong so far.
        """
        try:
            os.chdir(self._folder)
            folder = Path(self._config.job.dump_folder).absolute() / LOG_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            config = fetched(self._config, data=False) if self._config.lora.enable else self._config
            planned = dataclasses.replace(planned_servers(config, self._gpus, 0)[0], host=host)
            launch = dataclasses.replace(launches([planned])[0], name=str(self._index))
            self._supervisor = Supervisor([launch], folder, None, self._config.rollout.start_timeout_seconds, host)
            self._supervisor.start()
        except (UserError, ServerCommandError) as error:
            return f"[rollout] replicas = {self._config.rollout.replicas}: {error}"
        except OSError as error:
            return f"[job] dump_folder must be on a file system that all nodes share: {error}"
        return ""

    def state(self, known: ServerState | None, wait_s: float) -> ServerState:
        """How the server is, once that differs from what is `known`, or after a while."""
        supervisor = self._supervisor
        with supervisor.changed:
            supervisor.changed.wait_for(lambda: self._closing or supervisor.states[0] != known, wait_s)
            return supervisor.states[0]

    def close(self) -> None:
        """End the server, in bounded time."""
        if self._supervisor is not None:
            with self._supervisor.changed:
                self._closing = True
                self._supervisor.changed.notify_all()
            self._supervisor.close()
