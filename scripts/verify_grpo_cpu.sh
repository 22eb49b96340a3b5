#!/usr/bin/env bash
# Verify GRPO on a CPU: short runs of the quickstart task, each checked, with the real weight-sync protocol.
#
#   bash scripts/verify_grpo_cpu.sh [embedded] [fsdp] [tp] [vllm] [sglang] [async]      (default: all six)
#
#   embedded  one rank, its own server        fsdp   two FSDP2 ranks
#   vllm      one rank, real vLLM server      tp     two tensor-parallel ranks
#   sglang    one rank, real SGLang server
#   async     one rank, rollouts ahead of training: with blocking weight sync, then in the background
#
# vllm needs the environment of scripts/install_vllm_cpu.sh or VLLM_PYTHON, sglang likewise. STEPS (default 12) sets the
# length of each run, KEEP=folder keeps logs and metrics. Exit status 0 means that every check of every part held.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source "$(dirname "${BASH_SOURCE[0]}")/verify_common.sh"
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
cd "$(repo_root)"
[ $# -gt 0 ] || set -- embedded fsdp tp vllm sglang async
for part in "$@"; do
    case $part in
        embedded | fsdp | tp | vllm | sglang | async) ;;
        *) echo "error: unknown part $part; one of embedded, fsdp, tp, vllm, sglang, async" >&2; exit 2 ;;
    esac
done
begin
steps=${STEPS:-12}
flags=(--training.steps "$steps" --grpo.prompts_per_step 32 --validation.prompts 32 --validation.freq "$steps")
flags+=(--grpo.zero_variance_groups keep --grpo.entropy_coef 0.01)

# short_run NAME RANKS [flags ...]: a short run and its checks
short_run() {
    train "$@" --sft.steps 60 "${flags[@]}"
    check "$1" --steps "$steps" --export
}

for part in "$@"; do
    case $part in
        embedded) short_run embedded 1 ;;
        fsdp) short_run fsdp 2 ;;
        tp) short_run tp 2 --parallelism.tensor_parallel_degree 2 ;;
        vllm | sglang)
            venv=$("${part}_cpu_venv")
            variable=${part^^}_PYTHON
            if [ -z "${!variable:-}" ] && [ -x "$venv/bin/python" ]; then export "$variable=$venv/bin/python"; fi
            short_run "$part" 1 --rollout.engine "$part" --rollout.replicas 1
            ;;
        # A low learning rate after a warm start: slightly older weights pass the mismatch check, wrong ones fail.
        async) sync_twins 1 "$steps" 0.01 --sft.steps 20 --optimizer.lr 1e-5 "${flags[@]}" ;;
    esac
done
echo "verified: $*"
