"""The command line of vLLM."""

import json
from pathlib import Path

from torchtitan.grpo.process.server_commands.command import ServerCommand, ServerCommandError

CPU_MODEL_LEN = 1024
"""Longest request on a CPU, if nothing else is said and the model can take it: vLLM reserves memory for one."""
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
        # Its log would have little else than a line for each group.
        flags += ["--disable-access-log-for-endpoints", "/inference/v1/generate"]
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
