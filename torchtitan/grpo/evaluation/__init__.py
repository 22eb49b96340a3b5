"""What `torchtitan-grpo evaluate` is made of: a model's answers to held-out prompts, outside a run.

    inputs.py          the configuration that fits an evaluation; what a checkpoint's run has trained on
    results.py         answers.jsonl, result.json, config.toml, and the table of the terminal

The numbers themselves are reporting/estimates.py's, as in a run's validation.
"""
