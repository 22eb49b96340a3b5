"""A step's groups, summed losses and server reports as flat metrics. `docs/metrics.md` explains the names."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.data.group_arrays import as_array
from torchtitan.grpo.data.held_out import HeldOutAnswers
from torchtitan.grpo.data.samples import TEACHER, Group, Sample
from torchtitan.grpo.engines.fleet_view import FleetView
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.policy.advantages import zero_variance
from torchtitan.grpo.policy.distillation import reverse_kl_sum
from torchtitan.grpo.reporting.estimates import estimates

OWN_REWARD_METRICS = {
    f"reward/{name}" for name in ("mean", "std", "zero_variance_fraction", "failures", "failed_fraction")
}
"""An environment's score of such a name, or of a source's mean, gets a `_` behind it."""
Answers = tuple[list[tuple[int, int]], list[dict[str, Any]]]
"""Of a group, from `described`."""
Span = Sequence[float]
"""From when until when, by `time.monotonic()`."""
MEAN_REWARDS = ("greedy_reward", "sampled_reward")


def described(groups: list[Group], version: int) -> list[Answers]:
    """What `answer_metrics` asks of the answers, by group, as values that another process may get: how many tokens are
    how old, and what `_described` says of each answer.

    Args:
        version: Of the weights that train on the groups. A token's age is how many versions older it is.
    """
    result = []
    for group in filter(None, groups):  # not each sample: `unique` takes long to begin
        versions = np.concatenate([as_array(sample.sampled_versions, np.int64) for sample in group])
        found, counts = np.unique(versions, return_counts=True)
        ages = list(zip((version - found).tolist(), counts.tolist(), strict=True))
        result.append((ages, list(map(_described, group))))
    return result


def _described(sample: Sample) -> dict[str, Any]:
    return {
        "source": sample.prompt.source,
        "tokens": sample.sampled_tokens,
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "failures": len(sample.reward_failures.keys() - {TEACHER}),
        "teacher_failed": TEACHER in sample.reward_failures,
        "reverse_kl": None if sample.teacher_logprobs is None else reverse_kl_sum(sample),
        "kept": [] if sample.kept is None else [len(sample.kept.ids), int((sample.kept.counts > 0).sum())],
    }


def answer_metrics(
    groups: Sequence[Answers], rewards: Sequence[Sequence[float | None]], max_age: int
) -> dict[str, float]:
    """Rewards, lengths, ages and how answers ended, over all samples of a step. Empty if there are no samples.

    Means of rewards are over the answers that have one.

    Args:
        groups: From `described`.
        rewards: What advantages are made of, by group and sample: the samples' rewards less any length penalty.
        max_age: The greatest age allowed. Over 0, the share of tokens of each age is reported.
    """
    answers = [answer for _, group in groups for answer in group]
    if not answers:
        return {}
    scored = _rewards(answers)
    lengths = [answer["tokens"] for answer in answers]
    metrics = {
        "reward/zero_variance_fraction": fmean(map(zero_variance, rewards)),
        "reward/failures": sum(answer["failures"] for answer in answers),
        "reward/failed_fraction": 1 - len(scored) / len(answers),
        "rollout/answer_tokens": sum(lengths),
        "rollout/answer_tokens_mean": fmean(lengths),
        "rollout/answer_tokens_max": max(lengths),
        "rollout/truncated_fraction": fmean(answer["finish_reason"] == "length" for answer in answers),
        "rollout/aborted_fraction": fmean(answer["finish_reason"] == "abort" for answer in answers),
    }
    ages: Counter[int] = Counter()
    for of_group, _ in groups:
        ages.update(dict(of_group))
    if ages:
        tokens = ages.total()
        metrics |= {"rollout/age_mean": sum(a * n for a, n in ages.items()) / tokens, "rollout/age_max": max(ages)}
        if max_age:
            metrics |= {f"rollout/age_{age}_fraction": ages[age] / tokens for age in range(max_age + 1)}
    kept = [sum(column) for column in zip(*(answer["kept"] for answer in answers if answer["kept"]), strict=True)]
    if kept and kept[1]:
        metrics["rollout/kept_tokens_mean"] = kept[0] / kept[1]
    if scored:
        metrics |= {"reward/mean": fmean(scored), "reward/std": pstdev(scored)}
    by_function: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for name, score in answer["rewards"].items():
            by_function[name].append(score)
    metrics |= _source_metrics([group for _, group in groups])
    own = OWN_REWARD_METRICS | metrics.keys()
    for name, scores in by_function.items():
        key = f"reward/{name}"
        metrics[f"{key}_" if key in own else key] = fmean(scores)
    return metrics | _teacher_metrics(answers)


def _teacher_metrics(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Reverse KL divergence per token to the teachers, of each source too if there are several; none without any."""
    taught = [answer for answer in answers if answer["reverse_kl"] is not None]
    failures = sum(answer["teacher_failed"] for answer in answers)
    if not taught:
        return {"distill/failures": failures} if failures else {}
    metrics: dict[str, float] = {"distill/failures": failures}
    for source in dict.fromkeys(["", *(answer["source"] for answer in taught)]):
        own = [answer for answer in taught if source in ("", answer["source"])]
        name = f"distill/{source}/reverse_kl" if source else "distill/reverse_kl"
        metrics[name] = sum(a["reverse_kl"] for a in own) / max(1, sum(a["tokens"] for a in own))
    return metrics


def _source_metrics(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Mean reward and share of the groups for each source, if there are several."""
    by_source: defaultdict[str, list[Sequence[dict[str, Any]]]] = defaultdict(list)
    for group in groups:
        by_source[group[0]["source"]].append(group)
    metrics: dict[str, float] = {}
    for source, own in by_source.items():
        if not source:
            continue
        metrics[f"data/{source}/share"] = len(own) / len(groups)
        if scored := _rewards(answer for group in own for answer in group):
            metrics[f"reward/{source}/mean"] = fmean(scored)
    return metrics


def validation_metrics(answers: list[HeldOutAnswers], reward: Reward) -> dict[str, float]:
    """`estimates` of each held-out set, `validation/<set>/...` if it has a name, with the rewards' standard errors.

    With several sets, `validation/greedy_reward` and `validation/sampled_reward` are means over them.
    """
    metrics: dict[str, float] = {}
    for each in answers:
        prefix = f"validation/{each.held_out.name}/" if each.held_out.name else "validation/"
        of_set = estimates(each, reward)
        metrics |= {prefix + name: estimate.mean for name, estimate in of_set.items()}
        for name in MEAN_REWARDS:
            if name in of_set and (error := of_set[name].standard_error) is not None:
                metrics[f"{prefix}{name}_se"] = error
        metrics[f"{prefix}answer_tokens_mean"] = fmean(s.sampled_tokens for group in each.greedy for s in group)
    for name in MEAN_REWARDS:
        of_sets = [metrics[key] for each in answers if (key := f"validation/{each.held_out.name}/{name}") in metrics]
        if of_sets:
            metrics[f"validation/{name}"] = fmean(of_sets)
    return metrics


def _rewards(answers: Iterable[dict[str, Any]]) -> list[float]:
    """Of the answers that have one."""
    return [answer["reward"] for answer in answers if answer["reward"] is not None]


def policy_metrics(sums: dict[str, Any], servers: Sequence[str] = ()) -> dict[str, float]:
    """Means and shares per trained answer token, from the sums of `losses.policy_loss` over all rows and ranks. A step
    without tokens has none: an entropy or a ratio of 0 would be no measurement.

    If the sums of `sums.age_sums` (lists by age) are there too, the same for each age that has tokens. With those of
    `sums.by_server`, the mismatch of each of `servers` that has tokens.
    """
    tokens, compared = sums["tokens"], sums["mismatch_tokens"]
    metrics = {"train/loss": sums["loss"], "train/answer_tokens": tokens}
    if not tokens:
        return metrics
    metrics["policy/clip_fraction"] = (sums["clipped_low_tokens"] + sums["clipped_high_tokens"]) / tokens
    if compared:
        metrics["policy/mismatch_kl"] = sums["mismatch_kl_sum"] / compared
        metrics["policy/mismatch_abs"] = sums["mismatch_abs_sum"] / compared
    for name, key in (
        ("clip_low_fraction", "clipped_low_tokens"),
        ("clip_high_fraction", "clipped_high_tokens"),
        ("dual_clip_fraction", "dual_clipped_tokens"),
        ("ratio", "ratio_sum"),
        ("update_kl", "policy_kl_sum"),
        ("kl", "kl_sum"),
        ("entropy", "entropy_sum"),
        ("importance_weight", "importance_sum"),
        ("importance_masked_fraction", "importance_masked_tokens"),
        ("old_clip_fraction", "left_out_tokens"),
        ("centering", "centering_sum"),
        ("centering_rest", "centering_rest_sum"),
        ("route_agreement", "route_agreement_sum"),
        ("route_agreement_all_layers", "route_tokens_alike"),
    ):
        if key in sums:
            metrics[f"policy/{name}"] = sums[key] / tokens
    for name in ("top_k_kl", "top_k_mass"):
        if f"{name}_sum" in sums:
            metrics[f"distill/{name}"] = sums[f"{name}_sum"] / tokens
    if servers:
        ages = len(sums["server_tokens"]) // len(servers)
        of_server = {url: slice(i * ages, (i + 1) * ages) for i, url in enumerate(servers)}
        mismatch = {
            f"server/{_server_name(url)}/mismatch": sum(sums["server_mismatch_abs_sum"][own]) / tokens
            for url, own in of_server.items()
            if (tokens := sum(sums["server_tokens"][own]))
        }
        metrics |= mismatch | ({"server/mismatch_max": max(mismatch.values())} if mismatch else {})
        if drawn := sum(sums.get("server_drawn_tokens", [])[::ages]):
            metrics["policy/surprise"] = sum(sums["server_surprise_sum"][::ages]) / drawn
    return metrics | _expert_metrics(sums) | (_age_metrics(sums) if "age_tokens" in sums else {})


def _expert_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """The busiest expert of a layer against the mean, over the layers; and the share of experts without a token."""
    layers = [tokens for tokens in sums.get("expert_tokens", []) if sum(tokens)]
    if not layers:
        return {}
    return {
        "experts/load_max": fmean(max(tokens) / fmean(tokens) for tokens in layers),
        "experts/idle_fraction": fmean(tokens.count(0) / len(tokens) for tokens in layers),
    }


def _age_metrics(sums: dict[str, list[float]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for age, tokens in enumerate(sums["age_tokens"]):
        if not tokens:
            continue
        ratio, squared = sums["age_ratio_sum"][age], sums["age_ratio_squared_sum"][age]
        metrics |= {
            f"age/{age}/tokens_fraction": tokens / sum(sums["age_tokens"]),
            f"age/{age}/ratio": ratio / tokens,
            f"age/{age}/ess": ratio**2 / (tokens * squared),
            f"age/{age}/clipped_fraction": sums["age_clipped_tokens"][age] / tokens,
            f"age/{age}/mismatch_kl": sums["age_mismatch_kl_sum"][age] / tokens,
        }
    return metrics


def server_metrics(
    fleet: FleetView, busy: Mapping[str, Sequence[Span]], reports: list[SyncReport], step_s: float
) -> dict[str, float]:
    """Share of the step in which each server computed answers: it had requests and was not stopped for weights.

    Args:
        busy: When each server had requests in flight (`Places.take_busy_spans`), of one or several processes.
        reports: The pushes that ended in this step.
    """
    stops: defaultdict[str, list[Span]] = defaultdict(list)
    for report in reports:
        for url, stop in report.stops.items():
            stops[url].append(stop)
    urls = [server.url for server in fleet.servers if server.in_traffic or server.url in busy]
    if not urls or not step_s:
        return {}
    # A stop in which a server had no request takes nothing from its share: in sync mode that is the rule.
    busy_s = {url: _covered_s([*busy.get(url, ()), *stops[url]]) - _covered_s(stops[url]) for url in urls}
    shares = {url: min(1.0, seconds / step_s) for url, seconds in busy_s.items()}
    metrics = {f"server/{_server_name(url)}/busy_share": share for url, share in shares.items()}
    return metrics | {"server/busy_share": fmean(shares.values())}


def _covered_s(spans: Iterable[Span]) -> float:
    """Seconds in any of them."""
    covered, end = 0.0, -math.inf
    for since, until in sorted(map(tuple, spans)):
        covered += max(0.0, until - max(since, end))
        end = max(end, until)
    return covered


def sync_metrics(reports: list[SyncReport], fleet: FleetView) -> dict[str, float]:
    """The pushes that ended in this step: how many, the newest one's seconds by phase and server, and server counts.

    Of phases that each server has, `sync/<phase>_s` is the slowest server's.
    """
    servers = fleet.servers
    metrics: dict[str, float] = {
        "sync/pushes": sum(not report.alone for report in reports),
        "sync/catch_ups": sum(report.alone for report in reports),
        "sync/missed": sum(report.missed for report in reports),
        "sync/servers_in_traffic": sum(server.in_traffic for server in servers),
        "sync/servers_lost": sum(server.lost for server in servers),
        "sync/servers_restarted": fleet.keeper.restarts,
        "sync/version": min((server.version for server in servers if server.in_traffic), default=-1),
    }
    phases_of: dict[str, dict[str, float]] = {}
    for report in reports:
        phases_of |= report.servers
        if not report.alone:
            metrics["sync/gib"] = report.bytes / 2**30
            metrics |= {f"sync/{phase}_s": seconds for phase, seconds in report.seconds.items()}
    for url, phases in phases_of.items():
        metrics |= {f"server/{_server_name(url)}/{phase}_s": seconds for phase, seconds in phases.items()}
    for phase in ("pause", "wire", "apply", "acknowledge") if phases_of else ():
        metrics[f"sync/{phase}_s"] = max(phases[phase] for phases in phases_of.values())
    return metrics


def _server_name(url: str) -> str:
    return url.partition("://")[2].replace(":", "_").replace("/", "_")
