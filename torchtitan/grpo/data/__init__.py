"""From a dataset to prompts in a fixed order.

    sources.py     rows of `[data] source`: arithmetic, jsonl, hf, reasoning_gym;
                   which of them are held out
    prompts.py     PromptSource: renders rows, skips long ones, shuffles by the seed,
                   resumes exactly; asks the curriculum; supervised pairs
      curricula.py ready-made hooks for `[data] curriculum`
    samples.py     Prompt, Sample and Group, which every other room uses

A source of data is one function in sources.py that returns its rows.
"""
