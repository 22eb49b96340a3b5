#!/usr/bin/env bash
# Start a vLLM server that a run with `[rollout] engine = "vllm"` can use and send weights to.
#
#   bash scripts/serve_vllm.sh MODEL [--port N] [--host ADDRESS [--expose]] [--cpu | --gpu N[,N...]] [vLLM flags ...]
#
#   MODEL     folder with config.json and a tokenizer. If it holds no weights, add --load-format dummy: the trainer
#             sends them before the first rollout
#   --port    default 8000
#   --host    default 127.0.0.1. Whoever reaches the server can replace its weights. So an address that other machines
#             reach needs --expose too, and should have a key
#   --cpu     float32 on the CPU, with scripts/install_vllm_cpu.sh's environment unless VLLM_PYTHON is set
#   --gpu     CUDA devices, e.g. 0 or 2,3, counted among the visible ones; several become a tensor-parallel server.
#             Default: all that are visible, TP 1
#
# All other flags go to vLLM unchanged and override what is set here. VLLM_PYTHON: the Python that has vLLM (default
# python3). VLLM_API_KEY, if set, is required of clients on every route but /health ([rollout] api_key_env names it for
# the trainer). vLLM by itself asks for it on some routes only, not on those that replace weights.
# BUNDLE_TOKENS (default 32): the tokens of an answer that leave vLLM's engine together; 1 leaves vLLM as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() { sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
parse_serve_arguments vLLM "$@"

root=$(repo_root)
python=${VLLM_PYTHON:-python3}
if [ "$device" = cpu ] && [ -z "${VLLM_PYTHON:-}" ] && [ -x "$(vllm_cpu_venv)/bin/python" ]; then
    python=$(vllm_cpu_venv)/bin/python
fi

# Prints vLLM's folder without importing it, which takes many seconds. Run from /, so that no folder of this checkout is
# imported in place of an installed package.
vllm_folder=$(cd / && "$python" - "$root" <<'PY'
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

spec = importlib.util.find_spec("vllm")
if spec is None:
    sys.exit(
        f"error: {sys.executable} has no vLLM; set VLLM_PYTHON to the Python that has it, install it "
        "(pip install 'vllm>=0.25.1,<0.33'), or, for CPU, run scripts/install_vllm_cpu.sh"
    )
if "torchtitan_grpo" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
    sys.exit(
        f"error: {sys.executable} has vLLM but not this project's weight-sync plug-in; install it there:\n"
        f"    {sys.executable} -m pip install --no-deps {sys.argv[1]}"
    )
print(Path(spec.origin).parent)
PY
)

flags=(--model "$model" --host "$host" --port "$port" --logprobs-mode processed_logprobs)
flags+=(--weight-transfer-config '{"backend":"torchtitan_grpo"}')
# vLLM 0.32 serves the token-in, token-out route only with this flag. Older versions always do, and refuse the flag.
if grep -q enable_scale_out -r --include='*.py' "$vllm_folder/entrypoints"; then flags+=(--enable-scale-out); fi
if [ -n "${VLLM_API_KEY:-}" ]; then flags+=(--middleware torchtitan.grpo.inside_vllm.api_key.ApiKeyMiddleware); fi
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES='' VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
    export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
    flags+=(--dtype float32 --enforce-eager --max-model-len 1024)
    if [ ! -f "$model/tokenizer.json" ]; then flags+=(--skip-tokenizer-init); fi
else
    flags+=(--dtype bfloat16)
    if [ -n "$gpus" ]; then
        choose_gpus "$gpus"
        flags+=(--tensor-parallel-size "$gpu_count")
    fi
fi
export VLLM_SERVER_DEV_MODE=1 # the routes for pause, resume and weight updates
export VLLM_USE_FLASHINFER_SAMPLER=0 # it compiles kernels at the first request; a compiler may be missing
export VLLM_NO_USAGE_STATS=1
unset VLLM_PYTHON # vLLM warns of VLLM_ variables that it does not know
if [ -d "$model" ]; then export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"; fi

set -x
exec "$python" -m vllm.entrypoints.openai.api_server "${flags[@]}" ${extra[@]+"${extra[@]}"}
