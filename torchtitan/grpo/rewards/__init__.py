"""Scores for answers, from verifiable reward functions, in processes of their own if they may hang.

    functions.py   built-in functions: exact_match, numeric_match, math_verify,
                   reasoning_gym; resolve finds them, or a `module:function`
    final_number.py   what numeric_match compares: LaTeX, fractions, powers
    runner.py      RewardRunner.check(prompts) tries each function when a run starts;
                   score(samples) fills in each sample's reward
      Here         instant functions, in the calling thread
    trial.py       a right, a wrong and an empty answer, scored, for `--check`
    process.py     RewardWorker, one process and its pipe, replaced when it hangs or dies; WorkerLog, what it prints
    worker.py      what runs in that process: receives calls, sends scores
    failures.py    check_failures ends a run whose answers mostly have no reward

An answer on which a function failed has no reward and is left out of its group. The sample names function and reason.
To add a reward, write a function of (answer, prompt) and name it in `[reward] functions`: docs/rewards.md.
"""
