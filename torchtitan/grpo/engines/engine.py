"""What the trainer has to know of an inference engine: one row of the registry."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.grpo.engines.http_control import HttpControl
from torchtitan.grpo.engines.protocol import EngineClient
from torchtitan.grpo.process.server_commands.command import ServerCommand


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        command: How a server is started, and what it can do: facts that the configuration's rules ask for too.
        control: Control routes.
        client: Generation route. Called with address, API key (or None), seconds that a request may take, functions
            that return the newest weight version that the server has acknowledged and that any was sent (or None), and
            the size of the vocabulary.
        link, disk_link: How weights get there, over a process group and over files: subclasses of
            `weight_sync.link.ServerLink` as "module:Class". These are names since weight_sync/ imports this folder.
        scorer: Requests to a server that scores given tokens, as a teacher does: the name of a
            `rollouts.teachers.scorers.Scorer`; "" if it cannot.
        held: Compares the weights that a server holds with those published: the name of a class of `weight_sync.held`.
        repeats_in_flight: Seeded requests repeat their answers even when requests and weight updates arrive at other
            times than before, as they do with `[async_grpo]`. Decides what `[rollout] seeded_requests = "auto"` means.
        with_adapters: The row for a run with `[lora]`, if it is another one.
    """

    command: type[ServerCommand]
    control: type[HttpControl]
    client: Callable[[str, str | None, float, Callable[[], int], Callable[[], int] | None, int], EngineClient]
    link: str
    disk_link: str
    scorer: str
    held: str
    repeats_in_flight: bool
    with_adapters: "Engine | None" = None
