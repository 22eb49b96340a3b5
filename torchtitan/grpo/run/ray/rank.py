"""One rank inside a Ray actor: the trainer, unchanged, in the main thread of its process.

The main thread, because there Python handles signals (`stopping.py`), and because torch keeps CUDA's current device,
grad mode, autocast and default dtype for each thread. Ray runs a Compiled Graph in a background thread of each actor.
`join_graph` has it hand its loop over to `serve`, in the main thread. To hand over each order instead would wake up two
threads in every step.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray

from torchtitan.grpo.config.jobs import Job
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.process.import_path import import_function
from torchtitan.grpo.process.log_lines import init_log_lines
from torchtitan.grpo.run.ray.outcome import outcome_of
from torchtitan.grpo.run.ray.supervised import KEPT_FROM_RAY
from torchtitan.grpo.run.running import running

BEGIN, FINISH, WARM_UP = 0, -1, -2
"""Orders besides the numbers of steps, which start at 1."""
BEAT_S = 1.0
REGISTER_S = 30.0
LOOP_S = 30.0
"""How long Ray may take to start a graph's loop."""

Answer = int | dict[str, Any]
"""The step that the rank has reached; or how it ended (`outcome_of`)."""


class Rank:
    """The methods are called one after the other, in the main thread.

    None that trains raises. A rank that fails or stops closes its trainer and answers with its outcome.

    Args:
        agent: Actor of this node; it is told each second what this rank does.
        own: RANK, WORLD_SIZE and the like.
        environment: The driver's variables. Those that this process has already stay as they are.
        argv: The command line without the program's name.
        make: Import path of the trainer's class. It does not travel as a pickle.
        job: What the trainer reads of the configuration.
        folder: The driver's working directory; paths in the configuration are relative to it.
    """

    def __init__(
        self,
        agent: Any,
        own: dict[str, str],
        environment: dict[str, str],
        argv: list[str],
        make: str,
        job: Job,
        folder: str,
    ) -> None:
        missing = {name: v for name, v in environment.items() if name not in os.environ or name in KEPT_FROM_RAY}
        os.environ.update(missing | own)
        os.chdir(folder)
        self._agent, self._rank = agent, int(own["RANK"])
        self._argv, self._make, self._job = argv, make, job
        self._trainer: Any = None
        self._context: Any = None
        self._outcome: dict[str, Any] | None = None
        self._doing = "starting"
        self._told = threading.Event()
        self._bell = -1
        self._loop: Callable[[], None] = lambda: None
        self._has_loop = threading.Event()
        self._looped: Future[None] = Future()

    def start(self) -> Answer:
        """Build the trainer."""
        stacks = os.memfd_create("stacks")  # the agent reads it; nothing is left on a disk
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        known = self._agent.do.remote("register", self._rank, os.getpid(), stacks)
        ray.get(known, timeout=REGISTER_S)  # before the first beat: an agent has several threads
        threading.Thread(target=self._beat, name="ray-beat", daemon=True).start()
        return self._answer("starting", self._start)

    def train(self) -> Answer:
        """`dispatch = "loop"`: all of the run."""
        return self._answer("training", self._trainer.train)

    def call(self, order: int) -> Answer:
        """Execute an order: BEGIN, the number of the next step, FINISH or WARM_UP."""
        if self._outcome is not None:
            return self._outcome
        trainer = self._trainer
        if order > 0:
            return self._answer(f"training step {order}", trainer.train_step)
        if order == WARM_UP:
            return self._answer("warming up", lambda: warm_up(trainer))
        if order == FINISH:
            return self._answer("finishing", trainer.finish)
        return self._answer("beginning", trainer.begin)

    def join_graph(self, bell: str) -> int:
        """Before a Compiled Graph is built: have Ray hand over its loop.

        Args:
            bell: Path of a pipe on this node, to ring at every answer.

        Returns:
            This process's number.
        """
        from ray.dag import compiled_dag_node

        self._bell = os.open(bell, os.O_WRONLY)
        loop = compiled_dag_node.do_exec_tasks  # Ray sends it to its background thread by this name

        def hand_over(*arguments: Any) -> None:
            self._loop = lambda: loop(*arguments)
            self._has_loop.set()
            self._looped.result()  # Ray takes the end of its thread for the end of the graph

        compiled_dag_node.do_exec_tasks = hand_over
        return os.getpid()

    def serve(self) -> None:
        """Ring. Then execute what comes through the graph, until it is torn down."""
        if not self._has_loop.wait(LOOP_S):
            return  # its loop runs elsewhere; no order may go through it
        self._ring()
        try:
            self._looped.set_result(self._loop())
        except BaseException as error:
            self._looped.set_exception(error)
            raise

    def answer(self, order: bytes) -> bytes | dict[str, Any]:
        """`call`, for the graph."""
        answer = self.call(int(order))
        self._ring()
        return b"%d" % answer if isinstance(answer, int) else answer

    def _ring(self) -> None:
        os.write(self._bell, b".")

    def close(self) -> dict[str, Any]:
        """Release everything, unless that is done; say how the run ended."""
        self._doing = "closing"
        return self._outcome or self._end(None)

    def _start(self) -> None:
        init_log_lines()
        config = load_config(self._argv, job=self._job)
        context = running(config, import_function("the trainer's class", self._make))
        self._trainer = context.__enter__()
        self._context = context

    def _answer(self, doing: str, action: Any) -> Answer:
        self._doing = doing
        try:
            action()
        except BaseException as error:  # a signal's SystemExit too: Ray would end the process before anything is closed
            return self._end(error)
        self._doing = "waiting for the driver"
        return self._trainer.step

    def _end(self, error: BaseException | None) -> dict[str, Any]:
        try:
            if self._context is not None:
                self._context.__exit__(*((None, None, None) if error is None else sys.exc_info()))
        except BaseException as other:  # often what `save_when_stopped` makes of it
            error = other
        self._outcome = outcome_of(error)
        sys.stdout.flush()
        self._told.set()
        return self._outcome

    def _beat(self) -> None:
        """Tell the agent each second, and at the end, how far this rank is."""
        while self._outcome is None:
            step, progress = getattr(self._trainer, "step", 0), getattr(self._trainer, "progress", None)
            detail = progress.describe() if progress is not None and "training" in self._doing else ""
            self._tell("beat", self._doing, step, detail)
            self._told.wait(BEAT_S)
        self._tell("ended", self._outcome)

    def _tell(self, what: str, *values: Any) -> None:
        self._agent.do.remote(what, self._rank, *values)


def warm_up(trainer: Any) -> None:
    """Run the longest packed row forwards and backwards, and drop its gradients. No weight or random state changes.

    So no later step is the first to need its memory.
    """
    import torch

    from torchtitan.grpo.policy.microbatch import Microbatch
    from torchtitan.grpo.policy.rows import PackedSample

    layout, policy = replace(trainer.layout, ranks=1, share_prompts=False), trainer.policy
    tokens, longest = layout.row_tokens, trainer.config.training.seq_len
    samples = []
    while tokens > 0:
        document = min(tokens, longest)
        samples.append(PackedSample([0], [0] * document, 0.0, 0.0, [0.0] * document))
        tokens -= document
    [[row]] = layout.pack(samples)

    def loss_of(_: int, row: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs, _ = policy.model(row, 1.0)
        return (logprobs * row.weights).sum(), {}

    policy.gradients([Microbatch.of(row, trainer.device)], loss_of)
    policy.optimizers.zero_grad()
