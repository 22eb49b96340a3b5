"""What is known of each engine without asking a server: its command line, and what its servers can do.

One class for each engine. `torchtitan-grpo serve` may run in the engine's environment, which need not have torchtitan:
this file imports nothing but the standard library. `engines/registry.py` has the rest of an engine's row, and imports
it. What a flag is for is said here and nowhere else.
"""

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).parents[3]
"""Of the checkout, or site-packages."""
LOOPBACK = "127.0.0.1"
CPU_MODEL_LEN = 1024
"""Longest request on a CPU, if nothing else is said and the model can take it: vLLM reserves memory for one."""
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, in every model family."""
GRAPH_TOKENS = 1024
"""Tokens of the largest pass for which vLLM has a CUDA graph: twice --max-num-seqs, and this at most. Of itself vLLM
stops at 512 on Hopper GPUs. With that many answers under way, each pass with a new prompt is larger; without a graph,
generation of a small model then takes 1.4 times as long (docs/benchmarks.md). vLLM lowers it to the most tokens that a
pass may have."""
_GRAPH_FLAGS = (
    *("--max-cudagraph-capture-size", "--cudagraph-capture-sizes", "--compilation-config", "-cc", "-O"),
    *("--optimization-level", "--enforce-eager", "--speculative-config", "-sc", "--spec-"),
)
"""Beginnings of vLLM's own flags that speak of graphs, or need sizes of their own. With one of them, or with a file of
flags (--config), vLLM gets no flag about graphs."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's slots for adapters. A smaller adapter fits into a larger slot."""
VLLM_TOP_TOKENS = 20
"""vLLM's own --max-logprobs."""
_LOOK_S = 60.0

# Finds the engine without importing it, which takes many seconds.
_LOOK = """
import importlib.util, sys
from importlib.metadata import entry_points
spec = importlib.util.find_spec(sys.argv[1])
plugins = {point.name for point in entry_points(group="vllm.general_plugins")}
print(spec.submodule_search_locations[0] if spec else "", "torchtitan_grpo" in plugins, sep="\\n")
"""

# SGLang takes the key only as a flag, which `ps` would show. So it is added inside Python.
_ADD_SGLANG_KEY = (
    'import os, runpy, sys; sys.argv[1:1] = ["--api-key", os.environ.pop("SGLANG_API_KEY")]; '
    'runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)'
)

# `python -m torchtitan.grpo.engines.embedded`, but without upstream's `torchtitan/__init__.py`.
_EMBEDDED = "import torchtitan_overlay; from torchtitan.grpo.engines.embedded.__main__ import main; main()"


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


class EmbeddedCommand(ServerCommand):
    """The server of this package (engines/embedded). It takes requests as long as the model can."""

    engine = "embedded"
    title = "the embedded server"
    own_flags = ("--model", "--host", "--port", "--device", "--parent-pid", "--expose")
    bundled = True
    routes_on_cpu = True
    scores_at_any_temperature = True

    def environment(self) -> dict[str, str]:
        """This process's environment with this package importable.

        OpenMP threads sleep instead of spinning while they wait. Trainer and server share the cores, and on 2 busy
        cores more spinning threads than cores made decoding 10 times slower.
        """
        env = without_torchrun(os.environ)
        env.setdefault("OMP_WAIT_POLICY", "passive")
        return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))}

    def found_python(self) -> str:
        return sys.executable

    def engine_folder(self) -> str:
        return ""

    def _words(self, port: int, folder: str) -> list[str]:
        device, dtype = ("cpu", "float32") if self.gpus == () else (f"cuda:{(self.gpus or (0,))[0]}", "bfloat16")
        flags = ["--model", self.model, "--device", device, "--dtype", dtype, "--max-sequences", "1024"]
        flags += ["--api-key-env", self.key_env] if self.key_env else []
        flags += ["--host", self.host, "--port", str(port)]
        flags += [] if is_loopback(self.host) else ["--expose"]
        flags += ["--memory-share", f"{self.memory_share:g}"] if self.memory_share else []
        return ["-c", _EMBEDDED, *flags]


class VllmCommand(ServerCommand):
    engine = "vllm"
    title = "vLLM"
    python_variable = "VLLM_PYTHON"
    key_variable = "VLLM_API_KEY"
    own_flags = ("--model", "--host", "--port", "--api-key", "--tensor-parallel-size", "-tp")
    kept_on_cpu = False  # it needs a Triton for CPUs, which no package has
    quantizes = True
    _requirement = "'vllm>=0.25.1,<0.34'"
    _needs_plugin = True

    def environment(self) -> dict[str, str]:
        env = super().environment()
        env["VLLM_SERVER_DEV_MODE"] = "1"  # the routes for pause, resume and weight updates
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # compiles kernels at the first request; a compiler may be missing
        env["VLLM_NO_USAGE_STATS"] = "1"
        if self.fp8 or "marlin" in self.flags:
            env["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"  # vLLM before 0.32 has Marlin on GPUs that compute in FP8 only so
        if self.gpus == ():
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            # --enforce-eager leaves a compiled kernel in the sampler: the first answer waits 11 s for its C++.
            env.setdefault("TORCH_COMPILE_DISABLE", "1")
        return env

    def _words(self, port: int, folder: str) -> list[str]:
        flags = ["--model", self.model, "--host", self.host, "--port", str(port)]
        flags += ["--logprobs-mode", "processed_logprobs"]
        flags += ["--weight-transfer-config", '{"backend":"torchtitan_grpo"}']
        flags += ["--scheduling-policy", "priority"]  # held-out answers do not wait behind those for later steps
        # vLLM 0.32 serves the token-in, token-out route only with this flag. Older versions always do, and refuse it.
        entrypoints = Path(folder, "entrypoints") if folder else None
        if entrypoints and any(b"enable_scale_out" in path.read_bytes() for path in entrypoints.rglob("*.py")):
            flags.append("--enable-scale-out")
        if self.kept:
            if folder and b"return_sampling_mask" not in Path(folder, "engine", "arg_utils.py").read_bytes():
                raise ServerCommandError(
                    f"the vLLM of {self.found_python()} does not tell which tokens it kept, which [rollout] top_k "
                    "needs: install vLLM 0.32 or newer, or set top_k = 0"
                )
            flags.append("--return-sampling-mask")
        if self._key():
            flags += ["--middleware", "torchtitan.grpo.inside_vllm.api_key.ApiKeyMiddleware"]
        if self.lora_rank:
            slot = next(rank for rank in VLLM_LORA_RANKS if rank >= self.lora_rank)
            flags += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(slot)]
        if self.routes:  # other kernels of vLLM 0.25 choose experts without telling
            flags += ["--enable-return-routed-experts", "--moe-backend", "triton"]
        if self.fp8:  # Marlin rounds weights only
            on_gpu = ["fp8_per_tensor", "--linear-backend", "marlin"]
            on_gpu += [] if self.routes else ["--moe-backend", "marlin"]
            flags += ["--quantization", *(["fp8_per_block"] if self.gpus == () else on_gpu)]
        if self.top_tokens > VLLM_TOP_TOKENS:
            flags += ["--max-logprobs", str(self.top_tokens)]
        max_model_len = self.max_model_len
        if self.gpus == ():
            flags += ["--dtype", "bfloat16" if self.fp8 else "float32", "--enforce-eager"]
            max_model_len = max_model_len or min(CPU_MODEL_LEN, self._positions())
            flags += self._without_tokenizer()
        else:
            flags += ["--dtype", "bfloat16"]
            # On one GPU vLLM by itself schedules and starts kernels in one thread, which limits generation. A process
            # for each made 1.4 times the tokens with 512 answers of a 1.7B model (docs/benchmarks.md, section 7).
            flags += ["--distributed-executor-backend", "mp"]
            flags += self._graphs()
        if self.gpus:
            flags += ["--tensor-parallel-size", str(len(self.gpus))]
        if max_model_len:
            flags += ["--max-model-len", str(max_model_len)]
        flags += self._dummy_weights()
        flags += ["--gpu-memory-utilization", f"{self.memory_share:g}"] if self.memory_share else []
        flags += ["--enable-sleep-mode"] if self.sleeps else []
        return ["-m", "vllm.entrypoints.openai.api_server", *flags]

    def _graphs(self) -> list[str]:
        """How large a pass has a CUDA graph, if vLLM's own flags leave it open."""
        words = [word.replace("_", "-") for flag in self.flags for word in flag.split("=", 1)]
        if "--config" in words or any(word.startswith(_GRAPH_FLAGS) for word in words):
            return []
        known = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--max-num-seqs"]
        passes = 2 * int(known[-1]) if known and known[-1].isdecimal() else GRAPH_TOKENS
        return ["--max-cudagraph-capture-size", str(min(GRAPH_TOKENS, -(-passes // 16) * 16))]

    def _positions(self) -> int:
        """Tokens that the model can take."""
        try:
            return int(json.loads(Path(self.model, "config.json").read_text())["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError):
            return CPU_MODEL_LEN  # vLLM says what is wrong with the folder


class SglangCommand(ServerCommand):
    engine = "sglang"
    title = "SGLang"
    python_variable = "SGLANG_PYTHON"
    key_variable = "SGLANG_API_KEY"
    own_flags = (
        "--model-path",
        "--model",
        "--host",
        "--port",
        "--api-key",
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
    )
    maps_memory = False
    adapters_on_cpu = False
    adapter_files = True
    adapted_together = ((("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")), (("gate_proj",), ("up_proj",)))
    routes_recomputed = False
    _requirement = "sglang"

    def environment(self) -> dict[str, str]:
        env = super().environment()
        if self.gpus == ():
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        else:
            # SGLang would set it to 0. The trainer's NCCL uses its default, and both ends of a weight sync must agree.
            env.setdefault("NCCL_CUMEM_ENABLE", "-2")
        return env

    def _words(self, port: int, folder: str) -> list[str]:
        flags = ["--model-path", self.model, "--host", self.host, "--port", str(port)]
        if self.gpus == ():
            # These choose PyTorch's own code over compiled kernels.
            flags += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
            flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-overlap-schedule"]
            flags += ["--skip-server-warmup", *self._without_tokenizer()]
            # The cache is sized in tokens. A share of the memory would depend on what else the machine is doing.
            flags += ["--max-total-tokens", "4096", "--mem-fraction-static", "0.5"]
            flags.append("--sleep-on-idle")  # else an idle server keeps a core busy
        else:
            flags += ["--dtype", "bfloat16"]
        if self.lora_rank:
            flags += ["--enable-lora", "--max-lora-rank", str(self.lora_rank)]
            flags += ["--lora-target-modules", *self.lora_layers]
            flags += ["--max-loras-per-batch", str(self.lora_versions + 1)]  # the base counts as one
            flags += ["--lora-backend", "torch_native"] if self.gpus == () else []
        if self.routes:
            flags.append("--enable-return-routed-experts")
        if self.gpus:
            flags += ["--tp-size", str(len(self.gpus))]
        if self.max_model_len:
            flags += ["--context-length", str(self.max_model_len)]
        module = ["-c", _ADD_SGLANG_KEY] if self._key() else ["-m", "sglang.launch_server"]
        return [*module, *flags, *self._dummy_weights()]


COMMANDS: dict[str, type[ServerCommand]] = {
    command.engine: command for command in (EmbeddedCommand, VllmCommand, SglangCommand)
}
"""`[rollout] engine` and `[distill] engine` -> what is known of it."""


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


def http_url(host: str, port: int) -> str:
    """The base address of a host (a name, or an IPv4 or IPv6 address) and a port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name counts as beyond it, except `localhost`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
