#!/usr/bin/env bash
# Verify GRPO on two GPUs with a model of Qwen3-0.6B's shape and random weights, and clean up.
#
#   bash scripts/verify_grpo_2gpu.sh [server | fsdp]                    (default: server)
#
#   server  vLLM on GPU 1, the trainer on GPU 0, weights over NCCL
#   fsdp    both GPUs are FSDP2 ranks; the embedded server shares GPU 0, weights over gloo
#
# STEPS (default 6) sets the length, KEEP=folder keeps logs and metrics there. Exit 0 only if every check held.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mode=${1:-server}
case $mode in
    server | fsdp) ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "error: unknown mode $mode; server or fsdp" >&2; exit 2 ;;
esac
cd "$(repo_root)"
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt 2 ]; then echo "error: needs two GPUs, found $gpus" >&2; exit 1; fi

steps=${STEPS:-6}
work=${KEEP:-$(mktemp -d)}
mkdir -p "$work"
server=''
cleanup() {
    if [ -n "$server" ]; then
        kill -TERM -- "-$server" 2>/dev/null || true
        for _ in $(seq 100); do kill -0 -- "-$server" 2>/dev/null || break; sleep 0.1; done
        kill -KILL -- "-$server" 2>/dev/null || true
    fi
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap cleanup EXIT

"$python" scripts/make_tiny_model.py "$work/model" --layers 28 --dim 1024 --ffn-dim 3072 --heads 16 --kv-heads 8 \
    --head-dim 128 --vocab-size 151936 --max-tokens 2048 >/dev/null
flags=(--model.hf_assets_path "$work/model" --job.dump_folder "$work/run" --training.steps "$steps")
flags+=(--training.mixed_precision_param bfloat16 --training.seq_len 512 --training.tokens_per_microbatch 16384)
flags+=(--rollout.max_answer_tokens 256 --sft.steps 0 --validation.prompts 16 --validation.freq "$steps")
# No random answer is right: the entropy bonus is what changes the weights, so that every version differs.
flags+=(--grpo.prompts_per_step 64 --grpo.zero_variance_groups keep --grpo.entropy_coef 0.01 --optimizer.lr 1e-4)
if [ "$mode" = server ]; then
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    setsid bash scripts/serve_vllm.sh "$work/model" --gpu 1 --port "$port" --load-format dummy --max-model-len 2048 \
        --gpu-memory-utilization 0.6 > "$work/vllm_server.log" 2>&1 &
    server=$!
    ranks=1
    flags+=(--rollout.engine vllm --rollout.urls "http://127.0.0.1:$port")
else
    ranks=2
fi
echo "== $mode: $steps steps on $ranks trainer rank(s)"
if ! timeout 1500 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" grpo_train.py \
    --job.config_file train_configs/quickstart.toml "${flags[@]}" > "$work/trainer.log" 2>&1; then
    tail -60 "$work/trainer.log"
    if [ -f "$work/vllm_server.log" ]; then echo "== vLLM"; tail -30 "$work/vllm_server.log"; fi
    echo "FAIL  the run ended with an error"
    exit 1
fi
grep -o 'step [0-9].*' "$work/trainer.log"
# bfloat16 on both sides: other kernels round differently.
"$python" scripts/check_run.py "$work/run" --steps "$steps" --max-mismatch 0.05 --export
echo "verified: $mode"
