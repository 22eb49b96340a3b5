"""The command lines of vLLM and SGLang servers that a trainer can use and send weights to.

scripts/serve_vllm.sh and serve_sglang.sh run this file by itself, with the engine's Python: it imports nothing but the
standard library. `[rollout] replicas` imports it. What a flag is for is said here and nowhere else.
"""

import ipaddress
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""Of the checkout, or site-packages."""
LOOPBACK = "127.0.0.1"
PYTHON_VARIABLE = {"vllm": "VLLM_PYTHON", "sglang": "SGLANG_PYTHON"}
"""Names the Python that has the engine."""
KEY_VARIABLE = {"vllm": "VLLM_API_KEY", "sglang": "SGLANG_API_KEY"}
"""Holds the API key that the server asks for."""
OWN_FLAGS = {
    "vllm": ("--model", "--host", "--port", "--api-key", "--tensor-parallel-size", "-tp"),
    "sglang": (
        "--model-path",
        "--model",
        "--host",
        "--port",
        "--api-key",
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
    ),
}
"""Flags that only this file sets, from other arguments."""
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
_TITLE = {"vllm": "vLLM", "sglang": "SGLang"}
_CPU_VENV = {
    "vllm": ("TORCHTITAN_GRPO_VLLM_VENV", "vllm-cpu"),
    "sglang": ("TORCHTITAN_GRPO_SGLANG_VENV", "sglang-cpu"),
}
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


class ServerCommandError(Exception):
    """A server cannot be started like that. `status` is the scripts' exit status: 2 for wrong arguments, else 1."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerCommand:
    """A server of vLLM or SGLang that is to be started.

    Attributes:
        engine: "vllm" or "sglang".
        model: Folder with config.json and a tokenizer.
        python: The Python that has the engine.
        device: "cpu" (float32), "cuda", or "" for CUDA with all visible devices and no tensor parallelism.
        gpus: Indices among the visible CUDA devices. Several become a tensor-parallel server.
        max_model_len: Longest prompt and answer together, in tokens; None leaves it to the engine.
        flags: The engine's own flags. They come last, and the last of two wins.
        has_tokenizer: The folder has, or will have, a tokenizer. False: it is looked for.
        lora_rank: Of the adapters that it will get; 0 for none.
        lora_layers: The layers of a block that they adapt. SGLang makes place for these alone.
        lora_versions: How many versions of them answers may name at once. vLLM has one at a time.
        routes: Answers say which experts computed them.
    """

    engine: str
    model: str
    python: str
    host: str = LOOPBACK
    port: int = 8000
    device: str = ""
    gpus: tuple[int, ...] = ()
    max_model_len: int | None = None
    flags: tuple[str, ...] = ()
    has_tokenizer: bool = False
    lora_rank: int = 0
    lora_layers: tuple[str, ...] = ALL_LINEAR
    lora_versions: int = 1
    routes: bool = False

    def argv(self, folder: str, environ: Mapping[str, str]) -> list[str]:
        """The command line. It never holds an API key.

        Args:
            folder: Of the engine's package, from `engine_folder`; "" if it is not known.
            environ: Tells whether there is a key.
        """
        build = {"vllm": self._vllm, "sglang": self._sglang}[self.engine]
        return [self.python, *build(folder, environ), *self.flags]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with what the server needs.

        Raises:
            ServerCommandError: An index of `gpus` is not among CUDA_VISIBLE_DEVICES.
        """
        env = {name: value for name, value in environ.items() if name != PYTHON_VARIABLE[self.engine]}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = visible_devices(self.gpus, environ)
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        if os.path.isdir(self.model):
            env.setdefault("HF_HUB_OFFLINE", "1")
        if self.engine == "vllm":
            env["VLLM_SERVER_DEV_MODE"] = "1"  # the routes for pause, resume and weight updates
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # compiles kernels at the first request; a compiler may be missing
            env["VLLM_NO_USAGE_STATS"] = "1"
            if self.device == "cpu":
                env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
                env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                # --enforce-eager leaves a compiled kernel in the sampler: the first answer waits 11 s for its C++.
                env.setdefault("TORCH_COMPILE_DISABLE", "1")
        elif self.device == "cpu":
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        else:
            # SGLang would set it to 0. The trainer's NCCL uses its default, and both ends of a weight sync must agree.
            env.setdefault("NCCL_CUMEM_ENABLE", "-2")
        return env

    def _vllm(self, folder: str, environ: Mapping[str, str]) -> list[str]:
        flags = ["--model", self.model, "--host", self.host, "--port", str(self.port)]
        flags += ["--logprobs-mode", "processed_logprobs"]
        flags += ["--weight-transfer-config", '{"backend":"torchtitan_grpo"}']
        flags += ["--scheduling-policy", "priority"]  # held-out answers do not wait behind those for later steps
        # vLLM 0.32 serves the token-in, token-out route only with this flag. Older versions always do, and refuse it.
        entrypoints = Path(folder, "entrypoints") if folder else None
        if entrypoints and any(b"enable_scale_out" in path.read_bytes() for path in entrypoints.rglob("*.py")):
            flags.append("--enable-scale-out")
        if environ.get("VLLM_API_KEY"):
            flags += ["--middleware", "torchtitan.grpo.inside_vllm.api_key.ApiKeyMiddleware"]
        if self.lora_rank:
            slot = next(rank for rank in VLLM_LORA_RANKS if rank >= self.lora_rank)
            flags += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(slot)]
        if self.routes:  # other kernels of vLLM 0.25 choose experts without telling
            flags += ["--enable-return-routed-experts", "--moe-backend", "triton"]
        max_model_len = self.max_model_len
        if self.device == "cpu":
            flags += ["--dtype", "float32", "--enforce-eager"]
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
        return ["-m", "vllm.entrypoints.openai.api_server", *flags]

    def _sglang(self, folder: str, environ: Mapping[str, str]) -> list[str]:
        flags = ["--model-path", self.model, "--host", self.host, "--port", str(self.port)]
        if self.device == "cpu":
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
            flags += ["--lora-backend", "torch_native"] if self.device == "cpu" else []
        if self.routes:
            flags.append("--enable-return-routed-experts")
        if self.gpus:
            flags += ["--tp-size", str(len(self.gpus))]
        if self.max_model_len:
            flags += ["--context-length", str(self.max_model_len)]
        module = ["-c", _ADD_SGLANG_KEY] if environ.get("SGLANG_API_KEY") else ["-m", "sglang.launch_server"]
        return [*module, *flags]

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
            config = json.loads(Path(self.model, "config.json").read_text())
        except OSError:
            return CPU_MODEL_LEN  # vLLM says what is wrong with the folder
        return config.get("max_position_embeddings", CPU_MODEL_LEN)

    def _without_tokenizer(self) -> list[str]:
        has_one = self.has_tokenizer or os.path.isfile(os.path.join(self.model, "tokenizer.json"))
        return [] if has_one else ["--skip-tokenizer-init"]


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


def engine_folder(engine: str, python: str) -> str:
    """Where this Python has the engine's package. Its plug-in is there too, if it needs one. Takes about 0.1 s.

    Raises:
        ServerCommandError: The Python does not run, or something is not installed. The message says how to install it.
    """
    try:
        # From /, so that no folder of this checkout is imported in place of an installed package.
        command = [python, "-c", _LOOK, engine]
        looked = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=_LOOK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerCommandError(f"{python} does not run: {error}") from error
    lines = looked.stdout.splitlines()
    if looked.returncode or len(lines) < 2:
        raise ServerCommandError(f"{python} does not run: {looked.stderr.strip()[-500:]}")
    folder, plugin = lines[-2:]
    if not folder:
        wanted = {"vllm": "'vllm>=0.25.1,<0.33'", "sglang": "sglang"}[engine]
        raise ServerCommandError(
            f"{python} has no {_TITLE[engine]}; set {PYTHON_VARIABLE[engine]} to the Python that has it, install it "
            f"(pip install {wanted}), or, for CPU, run scripts/install_{engine}_cpu.sh"
        )
    if engine == "vllm" and plugin != "True":
        raise ServerCommandError(
            f"{python} has vLLM but not this project's weight-sync plug-in; install it there:\n"
            f"    {python} -m pip install --no-deps {ROOT}"
        )
    return folder


def main(arguments: list[str]) -> None:
    """`ENGINE MODEL [--port N] [--host ADDRESS [--expose]] [--cpu | --gpu N[,N...]] [the engine's flags ...]`.

    The scripts have it documented. This process becomes the server.
    """
    engine, *rest = arguments
    try:
        command = _parsed(engine, rest)
        folder = engine_folder(engine, command.python)
        argv, environment = command.argv(folder, os.environ), command.environment(os.environ)
    except ServerCommandError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    print("+", shlex.join(argv), file=sys.stderr, flush=True)
    os.execvpe(argv[0], argv, environment)


def _parsed(engine: str, arguments: list[str]) -> ServerCommand:
    key = KEY_VARIABLE[engine]
    given = {"--port": "8000", "--host": LOOPBACK, "--gpu": ""}
    model, device, expose, flags = "", "", False, []
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name == "--api-key":
            raise ServerCommandError(f"--api-key shows the key to everyone who runs ps: export {key} instead", 2)
        if name in given:
            if not equals and not left:
                raise ServerCommandError(f"{name} needs a value", 2)
            given[name] = value if equals else left.pop(0)
        elif word == "--expose":
            expose = True
        elif word == "--cpu":
            device = "cpu"
        elif not model and word.startswith("-"):
            raise ServerCommandError(f"MODEL comes first, before {_TITLE[engine]}'s own flag {word}", 2)
        elif not model:
            model = word
        else:
            flags.append(word)
    if not model:
        raise ServerCommandError("MODEL is missing: name a folder with config.json and a tokenizer", 2)
    try:
        port, gpus = int(given["--port"]), tuple(int(gpu) for gpu in given["--gpu"].split(",") if gpu)
    except ValueError:
        raise ServerCommandError(
            f"--port {given['--port']} and --gpu {given['--gpu']} must be numbers, as in --port 8000 --gpu 0,1", 2
        ) from None
    check_exposure(given["--host"], expose, f"Export {key}")
    if expose and not is_loopback(given["--host"]) and not os.environ.get(key):
        print(f"warning: --expose without {key}: whoever reaches port {port} can replace the weights", file=sys.stderr)
    device = "cuda" if gpus and not device else device
    python = engine_python(engine, device == "cpu")
    return ServerCommand(
        engine, model, python, given["--host"], port, device, () if device == "cpu" else gpus, None, tuple(flags)
    )


def engine_python(engine: str, cpu: bool) -> str:
    """The Python that has the engine: the one that the environment names; for the CPU that of scripts/install_*_cpu.sh,
    if there is one; else this one."""
    named = os.environ.get(PYTHON_VARIABLE[engine], "")
    if os.sep in named:
        return os.path.abspath(named)
    return named or (cpu and _installed_for_cpu(engine)) or sys.executable


def _installed_for_cpu(engine: str) -> str:
    """The Python of scripts/install_*_cpu.sh, "" if there is none."""
    variable, name = _CPU_VENV[engine]
    venv = os.environ.get(variable) or os.path.expanduser(f"~/.cache/torchtitan-grpo/{name}")
    python = os.path.join(venv, "bin", "python")
    return python if os.access(python, os.X_OK) else ""


if __name__ == "__main__":
    main(sys.argv[1:])
