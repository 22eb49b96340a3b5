#!/usr/bin/env bash
# Install SGLang for CPU into its own virtual environment.
#
#   bash scripts/install_sglang_cpu.sh [VENV_DIR] [VERSION]
#
# VENV_DIR: default $TORCHTITAN_GRPO_SGLANG_VENV, else ~/.cache/torchtitan-grpo/sglang-cpu. About 2.5 GB, some minutes.
# VERSION: default 0.5.23. Does nothing if a complete environment is there. PYTHON picks the Python. The server runs
# dense text models in float32. It is slow: use it for tests and experiments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
root=$(repo_root)
sglang_version=${2:-0.5.23}
lock_venv "${1:-$(sglang_cpu_venv)}"

# Complete: the wanted version of SGLang, and the whole server with a model, import on a CPU.
complete() {
    [ -x "$venv/bin/python" ] && (cd / && PYTHONPATH='' CUDA_VISIBLE_DEVICES='' SGLANG_USE_CPU_ENGINE=1 \
        "$venv/bin/python" - "$sglang_version" <<'PY'
import sys
from importlib.metadata import version

wanted = sys.argv[1]
if version("sglang") != wanted:
    sys.exit(f"sglang {version('sglang')} is installed, {wanted} is wanted")
import sglang.launch_server
import sglang.srt.entrypoints.http_server  # the whole server, so every dependency
import sglang.srt.models.qwen3
PY
    )
}

if complete >/dev/null 2>&1; then
    echo "SGLang $sglang_version (CPU) is complete in $venv"
    exit
fi

begin_install
echo "installing SGLang $sglang_version (CPU) into $venv"
echo "1/4 torch"
install_torch "$python" "$work/constraints.txt" cpu
echo "2/4 SGLang $sglang_version"
# Without its dependencies: they name another torch and many packages of CUDA kernels.
"$python" -m pip install --quiet --no-deps "sglang==$sglang_version"
echo "3/4 SGLang's requirements"
# Each version is written for one of transformers, and names it.
transformers=$("$python" -c 'from importlib.metadata import requires
print(*{name for name in requires("sglang") if name.startswith("transformers==")})')
sed "s/^transformers==.*/$transformers/" "$root/scripts/sglang_cpu_requirements.txt" > "$work/requirements.txt"
# pip also complains of SGLang's dependencies that are left out. Its output is shown only if the installation fails.
"$python" -m pip install --quiet -c "$work/constraints.txt" -r "$work/requirements.txt" \
    2> "$work/pip.log" || { cat "$work/pip.log" >&2; exit 1; }
echo "4/4 stand-ins for sgl_kernel and torchvision"
# sgl_kernel: SGLang's compiled kernels. No CPU wheel exists; a server on a CPU imports names from it and, with the
# flags of torchtitan-grpo serve sglang, calls none.
# torchvision: SGLang imports it even for text models. The wheel that belongs to this torch is built for CUDA and fails
# to import beside a CPU build. transformers, too, takes names from it as soon as it is there.
"$python" - <<'PY'
import sysconfig
from pathlib import Path

STAND_IN = '''"""A stand-in, written by torchtitan-grpo's install_sglang_cpu.sh: any name can be imported, none can be called."""

__version__ = "0"


class _Missing:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return _missing(self._name, name)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name}: only a stand-in is installed, see install_sglang_cpu.sh")


def _missing(parent, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{parent}.{name}")


def __getattr__(name):
    return _missing(__name__, name)
'''
packages = ["sgl_kernel", "torchvision", "torchvision/io", "torchvision/transforms"]
packages += ["torchvision/transforms/functional", "torchvision/transforms/v2", "torchvision/transforms/v2/functional"]
for package in packages:
    folder = Path(sysconfig.get_path("purelib"), package)
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(STAND_IN)
PY

if ! complete; then
    echo "error: the installation in $venv is not complete: see above" >&2
    exit 1
fi
echo "SGLang $sglang_version (CPU) is complete in $venv"
