"""The commands of `torchtitan-grpo`: what a user calls before, beside and after a run.

    console.py         the arguments of all of them, and which function runs; no torch
    __main__.py        the same as `python -m torchtitan.grpo.commands`
    evaluate.py        a model's answers to held-out prompts, by servers that it starts
    replay.py          training on the recorded answers of a run
    report.py          a run as one HTML file; run_report/ has its parts
    samples.py         a run's answers in the terminal
    plot.py            metrics of runs as a PNG
    serve.py           a vLLM or SGLang server to train with; no package but this one
    smollm2.py         a small pretrained model, from PyPI
    recipes.py         the recipes of train_configs
    env.py             what a report of a bug should say of the machine

`train` and `sft` are grpo_train.py and sft_train.py. Nothing imports this room.
"""
