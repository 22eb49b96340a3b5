"""Whether a run that was hit, and went on or was resumed, is the run that was not."""

import json
from collections import Counter
from collections.abc import Collection, Container, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from chaos.processes import TINY, Broken, Flags, metric_lines
from tests.helpers.trainer_runs import without_times
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.tokenizer import load_tokenizer


def check_bits(run: Path, whole: Path, checkpoints: Iterable[int], server_lost: set[int]) -> None:
    """Every checkpoint, metric that is no time, and sample is that of the uninterrupted run, to the last bit.

    Args:
        run, whole: The folders of both runs.
        checkpoints: Their steps.
        server_lost: The last steps of starts whose server was hit.

    Raises:
        Broken: Something differs.
    """
    check_checkpoints(run, whole, checkpoints)
    check_metrics(run, whole, server_lost)
    if (run / "samples.jsonl").read_text() != (whole / "samples.jsonl").read_text():
        raise Broken("samples.jsonl differs from the uninterrupted run's")


def check_checkpoints(run: Path, whole: Path, checkpoints: Iterable[int]) -> None:
    """Every checkpoint is that of the uninterrupted run, to the last bit. `checkpoints` are their steps."""
    for step in checkpoints:
        path = Path("checkpoint") / f"step-{step}"
        if not (run / path / "complete.json").is_file():
            raise Broken(f"the run has no checkpoint {step}")
        ours, theirs = _contents(run / path), _contents(whole / path)
        different = [name for name in ours.keys() | theirs.keys() if not _same(ours.get(name), theirs.get(name))]
        if different:
            raise Broken(f"checkpoint {step} differs from the uninterrupted run's in {sorted(different)[:8]}")


def check_metrics(run: Path, whole: Path, server_lost: Container[int] = (), apart: Collection[str] = ()) -> None:
    """Every metric that is no time is that of the uninterrupted run, to the last bit.

    Args:
        server_lost: See `check_bits`.
        apart: Metrics that differ.
    """
    names = [whole / "metrics.jsonl", run / "metrics.jsonl"]
    straight, resumed = (without_times([json.loads(line) for line in name.read_text().splitlines()]) for name in names)
    for line in straight + resumed:
        for name in apart:
            line.pop(name, None)
    for ours, theirs in zip(resumed, straight, strict=False):
        if ours.get("step") in server_lost:
            leave_out_lost_validation(ours, theirs)
    if straight != resumed:
        changed = [
            (ours.get("step"), name, ours.get(name), theirs.get(name))
            for ours, theirs in zip(resumed, straight, strict=False)
            for name in ours.keys() | theirs.keys()
            if ours.get(name) != theirs.get(name)
        ]
        raise Broken(f"{len(resumed)} lines of metrics, {len(straight)} without faults; they differ in {changed[:8]}")


def check_ledger(run: Path, flags: Flags, steps: int, samples: Iterable[tuple[int, int, int]]) -> None:
    """Every prompt that was taken was trained once, or still waits in the last checkpoint's buffer.

    Args:
        flags: Of the run.
        samples: Step, prompt and oldest version of every answer that was trained on.

    Raises:
        Broken: One was lost, came twice, or had tokens that were too old.
    """
    config = load_config([part for pair in flags.items() for part in pair if part])
    prompts, answers, max_age = config.grpo.prompts_per_step, config.grpo.group_size, config.async_grpo.max_age
    trained: Counter[int] = Counter()
    by_step: Counter[int] = Counter()
    for step, prompt, oldest in samples:
        trained[prompt] += 1
        by_step[step] += 1
        if oldest < step - 1 - max_age:
            raise Broken(f"step {step} trained on tokens of version {oldest}, bound {max_age}")
    if dict(by_step) != dict.fromkeys(range(1, steps + 1), prompts * answers):
        raise Broken(f"samples by step: {dict(by_step)}")
    state = msgspec.msgpack.decode((run / "checkpoint" / f"step-{steps}" / "rollouts.msgpack").read_bytes())
    waiting = [entry["prompt"] for entry in state["buffer"]["entries"]]
    if set(waiting) & trained.keys() or any(count != answers for count in trained.values()):
        twice = [index for index, count in trained.items() if count != answers]
        raise Broken(f"prompts trained more or less than once: {twice}; also waiting: {set(waiting) & trained.keys()}")
    supervised = config.sft.steps * config.sft.batch_size
    held_out = config.validation.prompts if config.validation.enable else 0
    source = PromptSource(config.data, load_tokenizer(str(TINY)), config.debug.seed, validation_prompts=held_out)
    taken = [prompt.index for prompt in source.next(supervised + state["buffer"]["next_number"])][supervised:]
    if set(taken) != trained.keys() | set(waiting):
        lost = sorted(set(taken) - trained.keys() - set(waiting))
        raise Broken(f"prompts lost: {lost}; from nowhere: {sorted((trained.keys() | set(waiting)) - set(taken))}")
    ages = [line["rollout/age_max"] for line in metric_lines(run)]
    if len(ages) != steps or max(ages) > max_age:
        raise Broken(f"oldest token by step: {ages}, bound {max_age}")


def check_prompts(run: Path, whole: Path, checkpoints: Iterable[int]) -> None:
    """All checkpoints are there, and each step has its version and the prompts of the uninterrupted run."""
    missing = [step for step in checkpoints if not (run / "checkpoint" / f"step-{step}" / "complete.json").is_file()]
    if missing:
        raise Broken(f"the resumed run has no checkpoints {missing}")
    facts = []
    for folder in (whole, run):
        steps = [(line["step"], line["sync/version"], line["train/skipped_steps"]) for line in metric_lines(folder)]
        samples = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
        facts.append((steps, [(sample["step"], sample["prompt_index"]) for sample in samples]))
    if facts[0] != facts[1]:
        raise Broken(f"steps, versions and prompts differ from the uninterrupted run's: {facts[1]}, {facts[0]}")


def leave_out_lost_validation(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Drop held-out rewards from two lines of one step, if ours has none: its server died while it was validated.

    Such a step is saved without them, and they are in no later run. Requests were sent again meanwhile.
    """
    if any(name.startswith("validation/") for name in ours):
        return
    for line in (ours, theirs):
        for name in [name for name in line if name.startswith("validation/") or name == "rollout/retried"]:
            del line[name]


def _contents(checkpoint: Path) -> dict[str, Any]:
    """Tensors and values of a checkpoint by name: weights, optimizer, schedule, random states, the trainer's state."""
    state: dict[str, Any] = {}
    reader = FileSystemReader(checkpoint / "dcp")
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    found = dict(_flat("dcp", state))
    for path in checkpoint.glob("rng-rank-*.pt"):
        states = torch.load(path, weights_only=True)
        # Python's and NumPy's generators are not seeded before the first checkpoint, and nothing here draws from them.
        found |= dict(_flat(path.name, {name: states[name] for name in states.keys() - {"python", "numpy"}}))
    found |= dict(_flat("trainer", json.loads((checkpoint / "trainer.json").read_text())))
    found |= dict(_flat("rollouts", msgspec.msgpack.decode((checkpoint / "rollouts.msgpack").read_bytes())))
    return found | {"export": (checkpoint / "hf" / "model.safetensors").read_bytes()}


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}/{key}", inner)]
    if isinstance(value, list | tuple):
        return [pair for i, inner in enumerate(value) for pair in _flat(f"{name}/{i}", inner)]
    return [(name, value)]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs
