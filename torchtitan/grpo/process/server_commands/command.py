"""A server that is to be started: what the engines share."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import ClassVar

from torchtitan.grpo.process.addresses import LOOPBACK, is_loopback

ROOT = Path(__file__).parents[4]
"""Of the checkout, or site-packages."""
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, in every model family."""
_LOOK_S = 60.0

# Finds the engine without importing it, which takes many seconds.
_LOOK = """
import importlib.util, sys
from importlib.metadata import entry_points
spec = importlib.util.find_spec(sys.argv[1])
plugins = {point.name for point in entry_points(group="vllm.general_plugins")}
print(spec.submodule_search_locations[0] if spec else "", "torchtitan_grpo" in plugins, sep="\\n")
"""


class ServerCommandError(Exception):
    """A server cannot be started like that. `status` is that of the process: 2 for wrong arguments, else 1."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerCommand:
    """A server that is to be started. A subclass is an engine, and its class attributes say what is known of it.

    Attributes:
        model: Folder with config.json and a tokenizer.
        gpus: Indices among the visible CUDA devices. Several become a tensor-parallel server. Empty: the CPU, in
            float32. None: all visible devices, without tensor parallelism.
        flags: The engine's own flags. They come last, and the last of two wins.
        max_model_len: Longest prompt and answer together, in tokens; None leaves it to the engine.
        key_env: The environment variable with the API key that it asks for; "" for none. No command line has the key.
        has_tokenizer: The folder has, or will have, a tokenizer. False: it is looked for.
        has_weights: It has weights too. False: the trainer sends them.
        memory_share: Of the memory of a GPU that it shares with a trainer; 0 leaves it to the engine.
        sleeps: It will give up its memory while the trainer trains.
        lora_rank: Of the adapters that it will get; 0 for none.
        lora_layers: The layers of a block that they adapt. SGLang makes place for these alone.
        lora_versions: How many versions of them answers may name at once. vLLM has one at a time.
        routes: Answers say which experts computed them.
        kept: Answers say which tokens could be drawn.
        fp8: It quantizes the linear layers of each version that it gets.
        top_tokens: How many likeliest tokens a request may ask for at each position.
    """

    engine: ClassVar[str]
    """`[rollout] engine`."""
    title: ClassVar[str]
    """As its makers write it."""
    python_variable: ClassVar[str] = ""
    """Names the Python that has the engine."""
    key_variable: ClassVar[str] = ""
    """Holds the API key that the server asks for."""
    own_flags: ClassVar[tuple[str, ...]]
    """Flags that only this file sets, from other arguments."""
    bundled: ClassVar[bool] = False
    """It is in this package, and runs in the trainer's Python on one device. So a run that names no servers starts one,
    on rank 0's GPU if no other is free."""
    maps_memory: ClassVar[bool] = True
    """It can read the trainer's memory on the same device, so the two can share a GPU."""
    adapters_on_cpu: ClassVar[bool] = True
    """It starts with `[lora]` on a CPU."""
    adapter_files: ClassVar[bool] = False
    """It reads adapters from files."""
    adapted_together: ClassVar[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = ()
    """Layers, and the layers of which it adapts none without these."""
    routes_on_cpu: ClassVar[bool] = False
    """It tells the experts of tokens on a CPU."""
    routes_recomputed: ClassVar[bool] = True
    """It still tells a token's experts after it has computed its keys and values again."""
    kept_on_cpu: ClassVar[bool] = True
    """It tells the kept tokens on a CPU."""
    quantizes: ClassVar[bool] = False
    """It quantizes weights that it gets, with new scales for each version. SGLang 0.5.23 computes them once."""
    scores_at_any_temperature: ClassVar[bool] = False
    """As a teacher it gives log-probabilities of given tokens at any temperature, not only at 1."""

    model: str
    gpus: tuple[int, ...] | None = None
    flags: tuple[str, ...] = ()
    host: str = LOOPBACK
    max_model_len: int | None = None
    key_env: str = ""
    has_tokenizer: bool = False
    has_weights: bool = True
    memory_share: float = 0.0
    sleeps: bool = False
    lora_rank: int = 0
    lora_layers: tuple[str, ...] = ALL_LINEAR
    lora_versions: int = 1
    routes: bool = False
    kept: bool = False
    fp8: bool = False
    top_tokens: int = 0

    def argv(self, port: int, folder: str = "") -> list[str]:
        """The command line. It never holds an API key.

        Args:
            folder: Of the engine's package, from `engine_folder`; "" if it is not known.
        """
        return [self.found_python(), *self._words(port, folder), *self.flags]

    def environment(self) -> dict[str, str]:
        """This process's environment with what the server needs, and its API key.

        Raises:
            ServerCommandError: An index of `gpus` is not among CUDA_VISIBLE_DEVICES.
        """
        # A key that happens to be in the environment would be asked for, and the trainer would not send it.
        left_out = self.python_variable, self.key_variable
        env = {name: value for name, value in without_torchrun(os.environ).items() if name not in left_out}
        if self.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible_devices(self.gpus, env) if self.gpus else ""
        if os.path.isdir(self.model):
            env.setdefault("HF_HUB_OFFLINE", "1")
        return env | ({self.key_variable: self._key()} if self._key() else {})

    def found_python(self) -> str:
        """The Python that has the engine: the one that the environment names; else for the CPU that of
        scripts/install_*_cpu.sh, if there is one; else this one."""
        named = os.environ.get(self.python_variable, "")
        if os.sep in named:
            named = os.path.abspath(named)
        return named or (self.gpus == () and self._installed_for_cpu()) or sys.executable

    def engine_folder(self) -> str:
        """Where its Python has the engine's package, "" if that is this one. Takes about 0.1 s.

        Raises:
            ServerCommandError: The Python does not run, or something is not installed. The message says how to install
                it.
        """
        python = self.found_python()
        try:
            # From /, so that no folder of this checkout is imported in place of an installed package.
            command = [python, "-c", _LOOK, self.engine]
            looked = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=_LOOK_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerCommandError(f"{python} does not run: {error}") from error
        lines = looked.stdout.splitlines()
        if looked.returncode or len(lines) < 2:
            raise ServerCommandError(f"{python} does not run: {looked.stderr.strip()[-500:]}")
        folder, plugin = lines[-2:]
        if not folder:
            raise ServerCommandError(
                f"{python} has no {self.title}; set {self.python_variable} to the Python that has it, install it "
                f"(pip install {self._requirement}), or, for CPU, run a checkout's scripts/install_{self.engine}_cpu.sh"
            )
        if self._needs_plugin and plugin != "True":
            raise ServerCommandError(
                f"{python} has {self.title} but not this project's weight-sync plug-in; install it there:\n"
                f"    {python} -m pip install --no-deps {source()}"
            )
        return folder

    _requirement: ClassVar[str] = ""
    _needs_plugin: ClassVar[bool] = False

    def _words(self, port: int, folder: str) -> list[str]:
        """The command line between the Python and `flags`."""
        raise NotImplementedError

    def _key(self) -> str:
        return os.environ.get(self.key_env, "")

    def _installed_for_cpu(self) -> str:
        """The Python of scripts/install_*_cpu.sh, "" if there is none."""
        folder = os.environ.get(f"TORCHTITAN_GRPO_{self.engine.upper()}_VENV")
        venv = folder or os.path.expanduser(f"~/.cache/torchtitan-grpo/{self.engine}-cpu")
        python = os.path.join(venv, "bin", "python")
        return python if os.access(python, os.X_OK) else ""

    def _dummy_weights(self) -> list[str]:
        return [] if self.has_weights else ["--load-format", "dummy"]

    def _without_tokenizer(self) -> list[str]:
        has_one = self.has_tokenizer or os.path.isfile(os.path.join(self.model, "tokenizer.json"))
        return [] if has_one else ["--skip-tokenizer-init"]


def source() -> str:
    """What pip can install this project from: the checkout, or what it was installed from here."""
    if (ROOT / "pyproject.toml").is_file():
        return str(ROOT)
    told = json.loads(distribution("torchtitan-grpo").read_text("direct_url.json") or "{}")
    vcs = told.get("vcs_info")
    return f"{vcs['vcs']}+{told['url']}@{vcs['commit_id']}" if vcs else told.get("url", "torchtitan_grpo-*.whl")


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that torchrun gives to its workers."""
    names = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    names |= {"GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
    return {k: v for k, v in environ.items() if k not in names and not k.startswith("TORCHELASTIC_")}


def check_exposure(host: str, expose: bool, key: str) -> None:
    """Refuse an address that other machines reach, without an explicit word.

    Args:
        key: How to set an API key, for the message.

    Raises:
        ServerCommandError: It is one, and `expose` is not set.
    """
    if not (expose or is_loopback(host)):
        raise ServerCommandError(
            f"--host {host!r} opens the server to other machines, and whoever reaches it can replace its weights. "
            f"{key}, which every route but /health then asks for, or close the port to others by a firewall; then add "
            "--expose",
            2,
        )


def visible_devices(gpus: Sequence[int], environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for these devices. As in torch, an index counts visible devices.

    Raises:
        ServerCommandError: There are not so many.
    """
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    wanted = ",".join(map(str, gpus))
    if not visible:
        return wanted
    if max(gpus) >= len(visible):
        raise ServerCommandError(
            f"--gpu {wanted}: CUDA_VISIBLE_DEVICES = {environ['CUDA_VISIBLE_DEVICES']} has {len(visible)} device(s)", 2
        )
    return ",".join(visible[gpu] for gpu in gpus)
