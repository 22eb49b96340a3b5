#!/usr/bin/env bash
# Start an SGLang server.
#
#   bash scripts/serve_sglang.sh MODEL [--port N] [--host ADDRESS [--expose]] [--cpu | --gpu N[,N...]] [SGLang flags ...]
#
#   MODEL     folder with config.json and a tokenizer (add --load-format dummy if it holds no weights)
#   --port    default 8000
#   --host    default 127.0.0.1. Whoever reaches the server can replace its weights. So an address that other machines
#             reach needs --expose too, and should have a key
#   --cpu     float32 on the CPU, with scripts/install_sglang_cpu.sh's environment unless SGLANG_PYTHON is set
#   --gpu     CUDA devices, e.g. 0 or 2,3, counted among the visible ones; several become a tensor-parallel server.
#             Default: all that are visible, TP 1
#
# All other flags go to SGLang unchanged and override what is set here. SGLANG_PYTHON: the Python that has SGLang
# (default python3). SGLANG_API_KEY, if set, is required of clients. No command line shows it, but SGLang's log does.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
parse_serve_arguments SGLang "$@"

python=${SGLANG_PYTHON:-python3}
if [ "$device" = cpu ] && [ -z "${SGLANG_PYTHON:-}" ] && [ -x "$(sglang_cpu_venv)/bin/python" ]; then
    python=$(sglang_cpu_venv)/bin/python
fi

# Run from /, so that no folder of this checkout is imported in place of an installed package.
(cd / && "$python" - <<'PY'
import importlib.util
import sys

if importlib.util.find_spec("sglang") is None:
    sys.exit(
        f"error: {sys.executable} has no SGLang; set SGLANG_PYTHON to the Python that has it, install it "
        "(pip install sglang), or, for CPU, run scripts/install_sglang_cpu.sh"
    )
PY
)

flags=(--model-path "$model" --host "$host" --port "$port")
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES='' SGLANG_USE_CPU_ENGINE=1
    # These choose PyTorch's own code over compiled kernels.
    flags+=(--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch)
    flags+=(--grammar-backend none --disable-overlap-schedule --skip-server-warmup)
    if [ ! -f "$model/tokenizer.json" ]; then flags+=(--skip-tokenizer-init); fi
    # The cache is sized in tokens. A share of the memory would depend on what else the machine is doing.
    flags+=(--max-total-tokens 4096 --mem-fraction-static 0.5)
    flags+=(--sleep-on-idle) # else an idle server keeps a core busy
else
    flags+=(--dtype bfloat16)
    # SGLang would set it to 0. The trainer's NCCL uses its default, and both ends of a weight sync must agree.
    export NCCL_CUMEM_ENABLE="${NCCL_CUMEM_ENABLE:--2}"
    if [ -n "$gpus" ]; then
        choose_gpus "$gpus"
        flags+=(--tp-size "$gpu_count")
    fi
fi
launch=(-m sglang.launch_server)
# SGLang takes the key only as a flag, which `ps` and the trace below would show. So it is added inside Python.
add_key='import os, runpy, sys; sys.argv[1:1] = ["--api-key", os.environ.pop("SGLANG_API_KEY")]; '
add_key+='runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)'
if [ -n "${SGLANG_API_KEY:-}" ]; then launch=(-c "$add_key"); fi
unset SGLANG_PYTHON # not one of SGLang's own
if [ -d "$model" ]; then export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"; fi

set -x
exec "$python" "${launch[@]}" "${flags[@]}" ${extra[@]+"${extra[@]}"}
