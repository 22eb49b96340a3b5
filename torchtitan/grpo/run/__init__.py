"""What every run has, whatever it trains and whoever started its processes.

    run.py                 `Run`: process group, mesh, checkpoints, metrics; the base of every trainer
    policy.py              `Policy`: the model, its reference, and what changes them
    rollouts.py            `Rollouts`: from prompts to packed rows, for the trainer
    kept_processes.py      its processes, each with its share of the prompts
    kept_process.py        one of them, as long as the run: another one follows when it ends
    rollout_process.py     the process that does it, as the trainer sees it
    rollout_service.py     the same from inside: what reads the trainer's words and answers; no torch
    rollout_worker.py      and what does the work; no torch
    explanation.py         `Explanation`: why a server does not sample from the policy
    packed.py              a step's groups as rows, or a process' share of them
    script.py              `run_job`: what a training script does with its command line
    check.py               `--check`: the task, read as a run reads it
    running.py             a run inside what its process needs around it
    nodes.py               what nodes owe one another: the same folder, the same mesh, a sign of life
    broadcast.py           from rank 0 to every rank: packed rows, small values, and that the run ends
    ending.py              `Ending`: how errors take a run to its end
    save_when_stopped.py   signals and errors save the last step
    run_folder.py          the dump folder: whether a run may begin in it
    watchdog.py            `Progress`: since when nothing was done; `Watchdog`: what every part waits for then
    ray/                   `[ray]`: its processes are actors

grpo_train.py, sft_train.py and commands/replay.py are `Run`s. Nothing else in the package imports this room.
"""
