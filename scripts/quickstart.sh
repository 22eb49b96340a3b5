#!/usr/bin/env bash
# See a model learn: install what is missing, then run train_configs/quickstart.toml.
#
#   bash scripts/quickstart.sh [flags of grpo_train.py ...]
#
# Works on a bare machine with Python 3.11 or newer: installs into the active virtual environment, or makes .venv. The
# next time it starts at once. Each run gets a folder of its own under outputs/, unless --job.dump_folder names one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
cd "$(repo_root)"
use_venv
is_installed || install_project .

# One thread for each process: with such small matrices two were slower (docs/benchmarks.md, section 1).
# Threads that wait do not spin. Where other work needs the cores too, spinning made runs take twice the CPU time.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
run="" config="" flag=""
for word in "$@" ""; do
    case $flag in
        --job.dump[_-]folder) run=$word ;;
        --job.dump[_-]folder=*) run=${flag#*=} ;;
        --job.config[_-]file*) config=given ;;
    esac
    flag=$word
done
if [ -z "$run" ]; then
    run=outputs/quickstart number=1
    while [ -e "$run" ]; do
        number=$((number + 1))
        run=outputs/quickstart-$number
    done
    set -- --job.dump_folder "$run" "$@"
fi
[ -n "$config" ] || set -- --job.config_file train_configs/quickstart.toml "$@"
"$python" grpo_train.py "$@"

echo
echo "The run is in $run. Its curves and answers as one HTML file, and answers here:"
echo "    ${python%/*}/torchtitan-grpo report $run"
echo "    ${python%/*}/torchtitan-grpo samples $run --step -1"
case $(nvidia-smi -L 2>/dev/null | grep -c '^GPU') in
    0) ;;
    1) echo "This machine has one GPU. Servers and trainer need one each: the recipes in train_configs/ start at two." ;;
    *)
        echo "This machine has GPUs. Try a real model next: README.md, \"Train your own\", with"
        echo "    train_configs/gsm8k_qwen3_0.6b_vllm_2gpu.toml"
        ;;
esac
