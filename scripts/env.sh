# Shared by the scripts here; sourced, never run. Sets nothing, defines functions.

# The repository's root folder.
repo_root() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd; }

# Print a Python of 3.11 to 3.14: $PYTHON if set, else the first that runs. A name on PATH may be a shim that fails.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.14 found; set PYTHON to one" >&2
    return 1
}

# vLLM's environment for tests and CPU servers, outside the checkout so that clones share it.
vllm_cpu_venv() { echo "${TORCHTITAN_GRPO_VLLM_VENV:-$HOME/.cache/torchtitan-grpo/vllm-cpu}"; }

# install_torch PYTHON CONSTRAINT_FILE: install torch unless it is there, then pin it in the file, so that nothing
# installed later brings another. Without a GPU: 2.13.0, whose CPU build pip prefers wherever it can find one
# (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL); elsewhere the same version comes with CUDA and is large.
install_torch() {
    local python=$1 constraints=$2 wanted="torch==2.13.0"
    if ! "$python" -c 'import torch' 2>/dev/null; then
        if nvidia-smi -L >/dev/null 2>&1 && [ "${3:-}" != cpu ]; then wanted="torch>=2.11,<2.14"; fi
        "$python" -m pip install --quiet "$wanted"
    fi
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$constraints"
}
