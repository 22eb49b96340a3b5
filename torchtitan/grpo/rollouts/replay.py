"""A run's recorded steps in place of servers."""

from pathlib import Path

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.routes import RouteShape
from torchtitan.grpo.data.samples import Group, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.rollouts.record import read_step, recorded_steps


class Replay:
    """Gives a trainer the recorded groups of one step after another, as a `RolloutStream` does, and asks no server.

    The trainer's first step is `after` + 1. It gets the first recorded step after `after`, the next step the next one.
    If their numbers differ, versions are shifted, so that every token has the age with which it was trained on.

    Args:
        run: The folder of the run that was recorded.
        after: Recorded steps up to this one are left out.

    Raises:
        UserError: The folder holds no such step.
    """

    def __init__(self, run: Path, after: int = 0) -> None:
        files = recorded_steps(run)
        self.after = after
        self._files = [(step, path) for step, path in files.items() if step > after]
        if not self._files:
            raise UserError(f"{run} has no recorded step after {after}: the last one is {max(files)}")

    @property
    def last_step(self) -> int:
        """The trainer's step that gets the last recorded one."""
        return self.after + len(self._files)

    def describe(self) -> str:
        first, last = self._files[0][0], self._files[-1][0]
        return f"{len(self._files)} recorded steps, {first} to {last}, train steps {self.after + 1} to {self.last_step}"

    def fit(self, config: JobConfig, vocab_size: int, routes: RouteShape | None = None) -> None:
        """Hold what `take` reads against this run: its lengths, ages, temperature and vocabulary. Begin with the first
        step, before a model is built for it."""
        self._config, self._vocab_size, self._routes = config, vocab_size, routes
        self.take(self.after)

    def take(self, version: int) -> list[Group]:
        """The groups of the step that trains weights of `version`.

        Raises:
            UserError: The file is damaged, or the run cannot train on it. The message names the key to change.
        """
        step, path = self._files[version - self.after]
        about, groups = read_step(path)
        shift = step - (version + 1)
        for sample in (sample for group in groups for sample in group):
            sample.versions = [sampled_by - shift for sampled_by in sample.versions]
            self._check(path, sample, version)
        if about["temperature"] != self._config.rollout.temperature:
            raise UserError(
                f"[rollout] temperature = {self._config.rollout.temperature:g}, and {path} was sampled at "
                f"{about['temperature']:g}, to which its log-probabilities belong: set that"
            )
        return groups

    def _check(self, path: Path, sample: Sample, version: int) -> None:
        config = self._config
        highest = max(max(sample.token_ids, default=0), max(sample.prompt.token_ids, default=0))
        tokens = len(sample.prompt.token_ids) + len(sample.token_ids)
        age = version - min(sample.sampled_versions, default=version)
        allowed = config.async_grpo.max_age
        wrong, shape, routes = "", self._routes, sample.routes
        key, wants = "[distill] top_k", config.distill.top_k
        if not wants:
            key, wants = "[grpo] score_centering", config.grpo.score_centering
        top = sample.top
        found = 0 if top is None else top.ids.shape[1]
        if shape is None:
            sample.routes = None
        if highest >= self._vocab_size:
            wrong = f"[model] hf_assets_path: {path} has token {highest}, and this model has {self._vocab_size} tokens"
        elif tokens > config.training.seq_len:
            wrong = (
                f"[training] seq_len = {config.training.seq_len} is under the {tokens} tokens of an answer in {path}"
            )
        elif age > allowed:
            wrong = f"[async_grpo] max_trajectory_age_steps: {path} has a token of age {age}, and {allowed} is allowed"
        elif (
            shape is not None
            and sample.sampled_tokens
            and (routes is None or routes.shape[1:] != (shape.layers, shape.top_k) or routes.dtype != shape.dtype)
        ):
            wrong = f"[grpo] routing_replay: {path} has no routing of this model"
        elif wants and sample.sampled_tokens and sample.reward is not None and found != wants:
            wrong = f"{key} = {wants}: {path} has the {found} likeliest tokens in place of each"
        elif top is not None and wants and int(top.ids.max(initial=-1)) >= self._vocab_size:
            wrong = f"[model] hf_assets_path: {path} has token {int(top.ids.max())}, which this model does not have"
        elif sample.kept is not None and (most := int(sample.kept.ids.max(initial=-1))) >= self._vocab_size:
            wrong = f"[model] hf_assets_path: {path} has token {most}, which this model does not have"
        if wrong:
            raise UserError(f"{wrong}: use the configuration of the run that was recorded")
