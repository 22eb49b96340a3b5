"""The command line of the server of this package."""

import os
import sys

from torchtitan.grpo.process.addresses import is_loopback
from torchtitan.grpo.process.server_commands.command import ROOT, ServerCommand, without_torchrun

# `python -m torchtitan.grpo.engines.embedded`, but without upstream's `torchtitan/__init__.py`.
_EMBEDDED = "import torchtitan_overlay; from torchtitan.grpo.engines.embedded.__main__ import main; main()"


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
