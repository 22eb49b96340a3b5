"""The engines by name."""

from torchtitan.grpo.process.server_commands.command import ServerCommand
from torchtitan.grpo.process.server_commands.embedded import EmbeddedCommand
from torchtitan.grpo.process.server_commands.sglang import SglangCommand
from torchtitan.grpo.process.server_commands.vllm import VllmCommand

COMMANDS: dict[str, type[ServerCommand]] = {
    command.engine: command for command in (EmbeddedCommand, VllmCommand, SglangCommand)
}
"""`[rollout] engine` and `[distill] engine` -> what is known of it."""
