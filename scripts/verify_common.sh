# Functions of verify_grpo_cpu.sh and verify_grpo_2gpu.sh. Sourced after env.sh, never run.

# begin: set `python` and `work`, a folder for everything (KEEP names one that stays). `trainer` is the process group
# that is stopped when the script ends or is stopped, and its servers with it.
begin() {
    python=$(find_python)
    work=${KEEP:-$(mktemp -d)}
    mkdir -p "$work"
    trainer=''
    trap end EXIT
}

# stop_group PID SECONDS: end the process group that PID leads, with SIGKILL after SECONDS. PID may be empty.
stop_group() {
    [ -n "$1" ] || return 0
    kill -TERM "$1" 2>/dev/null || true # the group leader, `timeout`, passes it on
    for _ in $(seq $(($2 * 10))); do kill -0 -- "-$1" 2>/dev/null || break; sleep 0.1; done
    kill -KILL -- "-$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true # or the shell would report its end
}

end() {
    stop_group "$trainer" 35 # torchrun gives its ranks 30
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}

# train NAME RANKS [flags ...]: a run of the quickstart task with these flags, in $work/NAME.
train() {
    local name=$1 ranks=$2 status=0
    shift 2
    echo "== $name: $ranks trainer rank(s)"
    # In the background, so that the shell handles signals while it waits. `timeout` leads a process group of its own.
    timeout 1500 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" grpo_train.py \
        --job.config_file train_configs/quickstart.toml --job.dump_folder "$work/$name" "$@" > "$work/$name.log" 2>&1 &
    trainer=$!
    wait "$trainer" || status=$?
    trainer=''
    if [ "$status" != 0 ]; then
        tail -60 "$work/$name.log"
        echo "FAIL  $name: the run ended with an error"
        exit 1
    fi
}

# check NAME [flags ...]: check that run with check_run.py.
check() {
    local name=$1
    shift
    "$python" scripts/check_run.py "$work/$name" "$@"
}

# sync_twins RANKS STEPS MAX_MISMATCH [flags ...]: the same run with [async_grpo] twice, with blocking weight sync and
# with weights sent in the background. Each is checked, and their speed compared. The age is 2: with 1, the next step's
# prompts would wait for the push that has just begun.
sync_twins() {
    local ranks=$1 checks=(--steps "$2" --max-mismatch "$3" --max-age 2)
    shift 3
    local flags=(--async_grpo.enabled --async_grpo.max_trajectory_age_steps 2 --checkpoint.no-enable "$@")
    train blocking "$ranks" "${flags[@]}"
    check blocking "${checks[@]}"
    train background "$ranks" "${flags[@]}" --weight_sync.async_weight_update
    check background "${checks[@]}" --background --blocking "$work/blocking"
}
