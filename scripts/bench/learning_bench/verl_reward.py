"""The reward of a configuration of grpo_train.py as verl calls it. verl's processes load this file by its path."""

import json
from typing import Any

import bench_common  # noqa: F401  puts the repository first on the path
from learning_bench.task import score

from torchtitan.grpo.data.samples import Prompt


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], function: str, pattern: str
) -> float:
    prompt = Prompt(extra_info["index"], [], "", ground_truth, json.loads(extra_info["columns"]))
    return score(function, pattern, solution_str, prompt)
