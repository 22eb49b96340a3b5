"""Environments of the package `verifiers` (https://github.com/PrimeIntellect-ai/verifiers, its v1 interface).

`[rollout] environment = "verifiers:NAME"` names a taskset. Its tasks are the prompts, its rubric gives the rewards, and
its harness holds the conversation. `[rollout] environment_args` is verifiers' own `[env]` table, and `select`.

A harness sends its model calls to verifiers' interception server, in OpenAI's form. That server asks a `Client`. Here
it is `FleetClient`, in this process, which asks the run's servers:

    harness -> InterceptionServer -> FleetClient -> endpoint Session -> RolloutClient -> servers

verifiers' own `TrainClient` renders prompts with a template that it has for each known model, and asks one address.
`FleetClient` renders with the run's own chat template, whatever the model. It knows each call's conversation, so
samples have the exact tokens, versions and masks, and a call that is given up is cancelled at the server.

verifiers runs on an event loop of its own: a task whose code blocks holds up no request of another group.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.endpoint.chat import Chat
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.process.event_loop import CLOSE_TIMEOUT_S, LoopThread
from torchtitan.grpo.rollouts.environment import RolloutClient
from torchtitan.grpo.rollouts.guarded_environment import innermost

try:
    from pydantic import ValidationError
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.env import Env
    from verifiers.v1.episode import Episode
    from verifiers.v1.task import Task, TaskData
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils import loaders

    from torchtitan.grpo.environments import in_process
    from torchtitan.grpo.environments.verifiers_client import ADDRESS, CURRENT, MODEL, Conversation, FleetInterception
except ModuleNotFoundError as missing:
    raise UserError(
        f'[rollout] environment = "verifiers:..." needs {missing.name!r}: pip install "verifiers>=0.4,<0.5"'
    ) from missing

START_TIMEOUT_S = 120.0
"""Longest wait for the tools that all conversations share."""
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')

# verifiers finds a harness as a module of this package.
sys.modules["verifiers.v1.harnesses.in_process"] = in_process
# Else every conversation and every model call is a line. What fails is said by `GuardedEnvironment`.
logging.getLogger("verifiers").setLevel(logging.ERROR)
logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class EpisodeFailed(Exception):
    """An episode that verifiers has given up.

    Attributes:
        place: Where, if verifiers knows.
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class VerifiersEnvironment:
    """One taskset of verifiers. A sample is one episode, or its parts if that has several traces.

    Args:
        name: The taskset's id: an installed package, one of verifiers' own, or a module in the folder of the run.
        template_arguments: `[data] chat_template_kwargs`.
        select: Which tasks: verifiers' SelectConfig, as in `{ limit = 1000 }`. A taskset without an end needs a limit.
        env: The other keys of verifiers' `[env]`. If neither they nor the taskset name a harness, it is
            `in_process.InProcessHarness`. A harness that executes no code runs on this machine by default.

    Attributes:
        rows: The tasks: `question` (messages), `task`, their number, `name`, `id`, and the fields of their own.
    """

    per_sample = True

    def __init__(
        self,
        name: str,
        template_arguments: Mapping[str, Any],
        /,
        select: Mapping[str, Any] | None = None,
        **env: Any,
    ) -> None:
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
        self._template_arguments = template_arguments
        self._env, tasks = _checked(name, dict(select or {}), env)
        self._tasks: list[Task] = list(tasks)
        self.rows = [_row(number, task) for number, task in enumerate(self._tasks)]
        self._context = ModelContext(MODEL, TrainClientConfig(base_url=ADDRESS, api_key_var="NONE"), SamplingConfig())
        self._chat: Chat | None = None
        self._closing = asyncio.Event()
        self._thread = LoopThread("verifiers")
        try:
            self._serving = self._thread.wait(self._start(), START_TIMEOUT_S)
        except TimeoutError:
            self._thread.close()
            raise UserError(
                f'[rollout] environment = "verifiers:{name}": waited {START_TIMEOUT_S:g} s for its tools and servers'
            ) from None
        except BaseException:
            self._thread.close()
            raise

    async def __call__(self, client: RolloutClient, prompt: Prompt) -> list[Sample]:
        """One sample.

        Raises:
            EpisodeFailed: verifiers gave the episode up: its task, harness, tools or rubric failed.
        """
        if self._chat is None:
            self._chat = Chat(client.tokenizer, self._template_arguments)
        conversation = Conversation(client, prompt, self._chat, asyncio.get_running_loop())
        try:
            episode = await self._thread.run(self._episode(conversation, self._tasks[prompt.columns["task"]]))
        finally:
            for session in conversation.sessions.values():
                session.end()
        return _samples(conversation, episode)

    def close(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                self._thread.wait(self._stop(), CLOSE_TIMEOUT_S)
        finally:
            self._thread.close()

    # ------------------------------------------------------------------------------------ on verifiers' event loop

    async def _start(self) -> asyncio.Task:
        ready = asyncio.Event()
        serving, waits = asyncio.create_task(self._serve(ready)), asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([serving, waits], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
        if serving.done():
            serving.result()  # raises what it could not start
        return serving

    async def _episode(self, conversation: Conversation, task: Task) -> Episode:
        CURRENT.set(conversation)
        [slot] = self._env.slots(task)
        async with _no_exit():
            return await self._env.run_slot(slot, self._context, on_trace=lambda trace: conversation.number(trace.id))

    async def _serve(self, ready: asyncio.Event) -> None:
        """Hold what all episodes share: shared tools, and the interception server. One task enters and leaves it."""
        async with _no_exit(), self._env.serving():
            shared = self._env._shared_tools
            secrets = tuple(each.state_secret for each in shared.values() if each.state_secret)
            async with FleetInterception(self._env._requires_tunnel(shared), secrets) as interception:
                own, self._env._interception = self._env._interception, interception
                try:
                    ready.set()
                    await self._closing.wait()
                finally:
                    self._env._interception = own

    async def _stop(self) -> None:
        self._closing.set()
        await self._serving


@contextlib.asynccontextmanager
async def _no_exit() -> AsyncIterator[None]:
    """Turn an exit, which would end the thread, into an error."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"exits: {error}") from error


def _checked(name: str, select: dict[str, Any], env: dict[str, Any]) -> tuple[Env, Any]:
    """The environment and its tasks.

    Raises:
        UserError: There is no such taskset, or a key or value is not verifiers'.
    """
    where = f'[rollout] environment = "verifiers:{name}"'
    try:
        id = _taskset_id(name)
        given = env | {"taskset": {**env.get("taskset", {}), "id": id}}
        if "agent" in loaders.env_config_type(id, env.get("id", "")).model_fields:
            given["agent"] = _with_harness(env.get("agent", {}), loaders.default_harness_id(id))
        built = loaders.load_environment(loaders.resolve_env_config(given))
        tasks = built.taskset.select(SelectConfig(**select))
    except ModuleNotFoundError as error:
        raise UserError(f"{where}: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"{where}: [rollout] environment_args: {problems}") from error
    if not tasks.bounded:
        raise UserError(f"{where} has tasks without end: give [rollout] environment_args select = {{ limit = 1000 }}")
    return built, tasks


def _taskset_id(name: str) -> str:
    """What verifiers knows a taskset by.

    It finds packages and top-level modules only. So a module in a folder, "folder.module", gets a name among its own.
    """
    if "." not in name:
        return name
    alias = name.replace(".", "_").lower()
    for kind in ("tasksets", "harnesses"):  # a module may bring a harness besides
        sys.modules[f"verifiers.v1.{kind}.{alias}"] = importlib.import_module(name)
    return alias


def _with_harness(agent: dict[str, Any], of_taskset: str) -> dict[str, Any]:
    """The agent's table with a harness. It runs here, and not in verifiers' cloud, unless it executes code."""
    harness = {"id": "in-process" if of_taskset == "bash" else of_taskset} | agent.get("harness", {})
    here = {} if loaders.harness_class(harness["id"]).EXECUTES_CODE else {"runtime": {"type": "subprocess"}}
    return here | agent | {"harness": harness}


def _row(number: int, task: Task) -> dict[str, Any]:
    data = task.data
    messages: list[dict[str, Any]] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message_to_wire(message) for message in data.prompt or []]
    if not messages or messages[-1]["role"] != "user":  # a simulated user speaks first
        messages.append({"role": "user", "content": data.description or data.name or "?"})
    own = data.model_dump(mode="json", exclude=set(TaskData.model_fields))
    return own | {"question": messages, "task": number, "name": data.name or "", "id": data.id or ""}


def _samples(conversation: Conversation, episode: Episode) -> list[Sample]:
    """What an episode's trained traces have sampled, each with its trace's reward.

    Raises:
        EngineError, FleetError, UserError: A model call failed for good.
        EpisodeFailed: The episode did.
    """
    by_trace = {trace_id: session.samples() for trace_id, session in conversation.sessions.items()}
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        if not errors:
            raise EpisodeFailed("the episode ended without a result", "verifiers")
        frames = [(file, int(line), function) for file, line, function in _PLACE.findall(errors[0].traceback or "")]
        raise EpisodeFailed(f"{errors[0].type}: {errors[0].message}", innermost(frames) if frames else "verifiers")
    samples = []
    for trace in episode.traces:
        if trace.agent is not None and not trace.agent.trainable:
            continue
        rewards = {name: each.score for name, each in trace.rewards.items() if each is not None}
        measured = {name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)}
        for sample in by_trace.get(trace.id, []):
            sample.rewards = measured | rewards
            sample.reward = float(trace.reward) if rewards else None
            samples.append(sample)
    if not samples:
        raise EpisodeFailed("no model call of the episode sampled a token", "verifiers")
    return samples
