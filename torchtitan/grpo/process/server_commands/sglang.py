"""The command line of SGLang."""

from torchtitan.grpo.process.server_commands.command import ServerCommand

# SGLang takes the key only as a flag, which `ps` would show. So it is added inside Python.
_ADD_SGLANG_KEY = (
    'import os, runpy, sys; sys.argv[1:1] = ["--api-key", os.environ.pop("SGLANG_API_KEY")]; '
    'runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)'
)


class SglangCommand(ServerCommand):
    engine = "sglang"
    title = "SGLang"
    python_variable = "SGLANG_PYTHON"
    key_variable = "SGLANG_API_KEY"
    own_flags = (
        *("--model-path", "--model", "--host", "--port", "--api-key"),
        *("--tensor-parallel-size", "--tp-size", "--tp"),
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
