"""Scores for answers, from verifiable reward functions in processes of their own.

    functions.py   built-in functions: exact_match, numeric_match, math_verify,
                   reasoning_gym; resolve finds them, or a `module:function`
    runner.py      RewardRunner.score(samples) fills in each sample's reward
      RewardWorker one process and its pipe; replaced when it hangs or dies
    worker.py      what runs in that process: receives calls, sends scores

A failed score counts as 0, is named in the sample and logged; it never stops the run.
To add a reward, write a function of (answer, prompt) and name it in `[reward] functions`.
"""
