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

usage() { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
for word in "$@"; do
    case $word in -h | --help) usage; exit ;; esac
done
if [ $# = 0 ]; then usage >&2; exit 2; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The flags are in that file. -I: no folder of this checkout is imported in place of an installed package.
exec "${SGLANG_PYTHON:-python3}" -I "$root/torchtitan/grpo/process/server_commands.py" sglang "$@"
