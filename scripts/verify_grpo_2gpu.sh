#!/usr/bin/env bash
# Verify GRPO on two GPUs with a model of Qwen3-0.6B's shape and random weights, and clean up.
#
#   bash scripts/verify_grpo_2gpu.sh [server | fsdp | async] [--section.key value ...]       (default: server)
#
#   server  vLLM (or ENGINE=sglang) on GPU 1, the trainer on GPU 0, weights over NCCL
#   fsdp    both GPUs are FSDP2 ranks; the embedded server shares GPU 0, weights over gloo
#   async   as server, with rollouts ahead of training: first with blocking weight sync, then in the background; prints
#           the throughput of both. Answers are short, so that a sync is a large share of a step
#
# More flags go to the trainer, for example --weight_sync.transport gloo for servers that NCCL does not reach.
# STEPS (default 6; async 30), PROMPTS (64; 32), ANSWERS (8) and TOKENS (256; 16) set the size of a run. KEEP=folder
# keeps logs and metrics. SERVER_URL names a running server of ENGINE for the folder MODEL; otherwise one is started, with
# SERVER_FLAGS (separated by commas; its share of the GPU's memory, 0.6).
# Exit status 0 means that every check held.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source "$(dirname "${BASH_SOURCE[0]}")/verify_common.sh"
mode=${1:-server}
if [ $# -gt 0 ]; then shift; fi
case $mode in
    server | fsdp) defaults=(6 64 8 256) ;;
    async) defaults=(30 32 8 16) ;;
    -h | --help) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "error: unknown mode $mode; server, fsdp or async" >&2; exit 2 ;;
esac
engine=${ENGINE:-vllm}
case $engine in
    vllm) server_flags=${SERVER_FLAGS:---gpu-memory-utilization,0.6} ;;
    sglang) server_flags=${SERVER_FLAGS:---mem-fraction-static,0.6} ;;
    *) echo "error: ENGINE=$engine; vllm or sglang" >&2; exit 2 ;;
esac
cd "$(repo_root)"
begin
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt 2 ]; then echo "error: needs two GPUs, found $gpus" >&2; exit 1; fi

steps=${STEPS:-${defaults[0]}} prompts=${PROMPTS:-${defaults[1]}}
answers=${ANSWERS:-${defaults[2]}} tokens=${TOKENS:-${defaults[3]}}
model=${MODEL:-$work/model}
[ -n "${MODEL:-}" ] || "$python" scripts/make_tiny_model.py "$model" --layers 28 --dim 1024 --ffn-dim 3072 --heads 16 \
    --kv-heads 8 --head-dim 128 --vocab-size 151936 --max-tokens 2048 >/dev/null
flags=(--model.hf_assets_path "$model" --training.steps "$steps")
flags+=(--training.mixed_precision_param bfloat16 --training.seq_len 512 --training.tokens_per_microbatch 16384)
flags+=(--sft.steps 0 --validation.prompts 16 --validation.freq "$steps")
flags+=(--grpo.prompts_per_step "$prompts" --grpo.group_size "$answers" --rollout.max_answer_tokens "$tokens")
# Random answers are all wrong, so only the entropy bonus changes the weights and makes every version different.
flags+=(--grpo.zero_variance_groups keep --grpo.entropy_coef 0.01 "$@")

ranks=2
if [ "$mode" != fsdp ]; then
    ranks=1
    flags+=(--rollout.engine "$engine")
    if [ -n "${SERVER_URL:-}" ]; then
        flags+=(--rollout.urls "$SERVER_URL")
    else
        flags+=(--rollout.replicas 1 --rollout.server_flags="$server_flags")
    fi
fi
# The mismatch limit allows for bfloat16 in different kernels, and in async for weights up to two steps old.
if [ "$mode" = async ]; then
    sync_twins "$ranks" "$steps" 0.3 --optimizer.lr 5e-6 "${flags[@]}"
else
    train "$mode" "$ranks" --optimizer.lr 1e-4 "${flags[@]}"
    grep -o 'step [0-9].*' "$work/$mode.log"
    check "$mode" --steps "$steps" --max-mismatch 0.05 --export
fi
echo "verified: $mode"
