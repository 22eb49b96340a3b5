from dataclasses import replace

import pytest

from torchtitan.grpo.config.job_config import Reward
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.config.tables import validation_metric_names
from torchtitan.grpo.data.held_out import HeldOut, HeldOutAnswers
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.push_report import SyncReport
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.reporting.step_metrics import (
    answer_metrics,
    described,
    policy_metrics,
    server_metrics,
    sync_metrics,
    validation_metrics,
)

PROMPT = Prompt(index=0, token_ids=[1, 2], text="1+1=", answer="2")


def sample(reward: float, tokens: int, finish: str = "stop") -> Sample:
    rewards = {"exact_match": reward}
    return Sample(PROMPT, [5] * tokens, [-0.5] * tokens, [0] * tokens, finish, rewards=rewards, reward=reward)


def unscored(tokens: int) -> Sample:
    failures = {"judge": "raised OSError", "style": "returned nan"}
    return Sample(
        PROMPT, [5] * tokens, [-0.5] * tokens, [0] * tokens, "stop",
        rewards={"exact_match": 0.0}, reward_failures=failures,
    )  # fmt: skip


def rollout_metrics(groups, rewards, version: int, max_age: int) -> dict[str, float]:
    return answer_metrics(described(groups, version), rewards, max_age)


def test_rollout_metrics_of_two_groups():
    groups = [[sample(1.0, 2), sample(0.0, 4, "length")], [sample(1.0, 3), sample(1.0, 7, "abort")]]
    groups[0][0].versions = [2, 3]
    metrics = rollout_metrics(groups, [[1.0, 0.0], [1.0, 1.0]], 3, 0)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(0.1875**0.5)
    assert metrics["reward/exact_match"] == 0.75
    assert metrics["reward/zero_variance_fraction"] == 0.5
    assert metrics["reward/failures"] == metrics["reward/failed_fraction"] == 0
    assert (metrics["rollout/answer_tokens"], metrics["rollout/answer_tokens_max"]) == (16, 7)
    assert (metrics["rollout/age_mean"], metrics["rollout/age_max"]) == ((1 + 0 + 14 * 3) / 16, 3)
    assert metrics["rollout/truncated_fraction"] == metrics["rollout/aborted_fraction"] == 0.25


def test_no_groups_give_no_metrics():
    assert rollout_metrics([], [], 0, 0) == {}


def test_answers_without_a_reward_are_counted_and_in_no_mean():
    groups = [[sample(1.0, 2), unscored(2)], [unscored(2), unscored(2)]]
    metrics = rollout_metrics(groups, [[1.0, None], [None, None]], 3, 0)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (1.0, 0.0)
    assert metrics["reward/exact_match"] == 0.25, "this function did not fail"
    assert (metrics["reward/failures"], metrics["reward/failed_fraction"]) == (6, 0.75)
    assert metrics["reward/zero_variance_fraction"] == 1.0
    assert "reward/mean" not in rollout_metrics(groups[1:], [[None, None]], 3, 0)
    answers = HeldOutAnswers(HeldOut("", [], 2, 1.0, 8), [[sample(1.0, 2)], [unscored(2)]], groups)
    held_out = validation_metrics([answers], Reward())
    names = ("greedy_reward", "sampled_reward", "pass_at_1")
    assert [held_out[f"validation/{name}"] for name in names] == [1.0, 1.0, 1.0]
    assert "validation/pass_at_2" not in held_out, "no prompt has two answers with a reward"


def test_an_environments_scores_overwrite_no_metric():
    """An environment, or an endpoint's client, may call its scores what it likes."""
    names = ["mean", "std", "failures", "failed_fraction", "zero_variance_fraction", "sums/mean", "turns"]
    scored = [replace(sample(reward, 2), prompt=replace(PROMPT, source="sums")) for reward in (0.0, 1.0)]
    without = rollout_metrics([scored], [[0.0, 1.0]], 0, 0)
    scored = [replace(each, rewards=dict.fromkeys(names, 7.0)) for each in scored]
    metrics = rollout_metrics([scored], [[0.0, 1.0]], 0, 0)
    del without["reward/exact_match"]
    own = {f"reward/{name}_": 7.0 for name in names[:-1]} | {"reward/turns": 7.0}
    assert metrics == without | own


def test_a_length_penalty_is_a_signal():
    groups = [[sample(1.0, 2), sample(1.0, 7)]]
    assert rollout_metrics(groups, [[1.0, 0.25]], 0, 0)["reward/zero_variance_fraction"] == 0.0


def answers(name: str, greedy: list[float], sampled: list[list[float]]) -> HeldOutAnswers:
    held_out = HeldOut(name, [], len(sampled[0]), 1.0, 8)
    groups = [[sample(reward, 2)] for reward in greedy], [[sample(reward, 1) for reward in each] for each in sampled]
    return HeldOutAnswers(held_out, *groups)


def test_validation_metrics_of_the_plain_set_have_no_name_in_theirs():
    of_two = Reward(functions=["a", "b"])
    metrics = validation_metrics([answers("", [1.0, 0.0, 0.5], [[0.0, 2.0], [1.9, 0.0], [0.0, 0.0]])], of_two)
    assert metrics["validation/greedy_reward"] == 0.5
    assert metrics["validation/greedy_reward_se"] == pytest.approx(0.5 / 3**0.5)
    assert metrics["validation/pass_at_2"] == pytest.approx(1 / 3)
    assert metrics["validation/sampled_reward"] == pytest.approx(3.9 / 6)
    assert metrics["validation/answer_tokens_mean"] == 2


def test_validation_metrics_of_several_sets_and_their_mean():
    sets = [answers("a", [1.0, 0.0], [[1.0], [1.0]]), answers("b", [1.0], [[0.0]])]
    metrics = validation_metrics(sets, Reward())
    assert (metrics["validation/a/greedy_reward"], metrics["validation/b/greedy_reward"]) == (0.5, 1.0)
    assert (metrics["validation/greedy_reward"], metrics["validation/sampled_reward"]) == (0.75, 0.5)
    assert "validation/a/greedy_reward_se" in metrics and "validation/b/greedy_reward_se" not in metrics
    assert "validation/pass_at_1" not in metrics and metrics["validation/a/pass_at_1"] == 1.0


SETS = "[[data.mixture]]\nname = 'sums'\n[[data.mixture]]\nname = 'products'\n[validation]\nenable = true\n"


@pytest.mark.parametrize(("text", "names"), [("", [""]), (SETS, ["sums", "products"])], ids=["one", "two"])
def test_the_metrics_of_validation_are_known_from_the_configuration(tmp_path, text, names):
    (tmp_path / "run.toml").write_text(text)
    flags = ["--model.hf_assets_path", "m", "--validation.samples_per_prompt", "3"]
    config = load_config(["--job.config_file", str(tmp_path / "run.toml"), *flags])
    measured = validation_metrics([answers(name, [1.0, 0.0], [[0.0, 1.0, 1.0]] * 2) for name in names], config.reward)
    assert set(validation_metric_names(config, "grpo")) == {name for name in measured if not name.endswith("_se")}


def test_sources_have_their_own_rewards_and_shares():
    groups = [[sample(1.0, 2)], [sample(0.0, 2)], [sample(0.5, 2), sample(0.0, 2)]]
    for group, source in zip(groups, ("sums", "sums", "gsm8k"), strict=True):
        for each in group:
            each.prompt = replace(PROMPT, source=source)
    groups[2][0].rewards = {"math_verify": 0.5}
    metrics = rollout_metrics(groups, [[1.0], [0.0], [0.5, 0.0]], 0, 0)
    assert (metrics["reward/sums/mean"], metrics["reward/gsm8k/mean"]) == (0.5, 0.25)
    assert metrics["data/sums/share"] == pytest.approx(2 / 3)
    assert (metrics["reward/math_verify"], metrics["reward/exact_match"]) == (0.5, pytest.approx(1 / 3))


def test_policy_metrics_are_per_token_and_a_step_without_tokens_has_none():
    sums = {"tokens": 4.0, "loss": 0.3, "clipped_low_tokens": 1.0, "clipped_high_tokens": 1.0, "ratio_sum": 4.4}
    sums |= {"mismatch_tokens": 2.0, "mismatch_kl_sum": 0.2, "mismatch_abs_sum": 0.4}
    metrics = policy_metrics(sums)
    assert metrics["train/loss"] == 0.3
    assert metrics["policy/clip_fraction"] == 0.5
    assert metrics["policy/ratio"] == pytest.approx(1.1)
    assert metrics["policy/mismatch_abs"] == 0.2
    assert "policy/kl" not in metrics
    assert policy_metrics(dict.fromkeys(sums, 0.0)) == {"train/loss": 0.0, "train/answer_tokens": 0.0}
    uncompared = policy_metrics(sums | {"mismatch_tokens": 0.0})  # a first minibatch without a signal
    assert uncompared == {name: value for name, value in metrics.items() if "mismatch" not in name}
    sums |= {"server_tokens": [3.0, 0.0, 0.0, 0.0, 1.0, 1.0]}  # of two ages each
    sums |= {"server_drawn_tokens": [3.0, 0.0, 0.0, 0.0, 1.0, 1.0], "server_surprise_sum": [-1.0, 9, 0, 9, 0.6, 9]}
    sums |= {"server_mismatch_abs_sum": [0.3, 0.0, 0.0, 0.0, 0.1, 0.0]}
    assert policy_metrics(sums, ["http://a:1", "http://b:1", "http://c:1"]) == metrics | {
        "server/a_1/mismatch": pytest.approx(0.1),
        "server/c_1/mismatch": 0.05,
        "server/mismatch_max": pytest.approx(0.1),
        "policy/surprise": pytest.approx(-0.4 / 4),
    }


def test_load_of_experts_is_of_the_busiest_and_the_idle():
    sums = dict.fromkeys(("tokens", "loss", "clipped_low_tokens", "clipped_high_tokens"), 0.0)
    sums |= {"tokens": 4.0, "mismatch_tokens": 0.0}
    metrics = policy_metrics(sums | {"expert_tokens": [[6.0, 0.0, 0.0, 2.0], [2.0, 2.0, 2.0, 2.0]]})
    assert metrics["experts/load_max"] == (3.0 + 1.0) / 2
    assert metrics["experts/idle_fraction"] == (0.5 + 0.0) / 2
    assert not any(name.startswith("experts/") for name in policy_metrics(sums | {"expert_tokens": [[0.0, 0.0]]}))


def test_policy_metrics_by_age_leave_out_ages_without_tokens():
    ratios = {0: [1.0, 1.0, 1.0], 2: [0.5, 2.0]}
    sums = {"tokens": 5.0, "loss": 0.3, "clipped_low_tokens": 1.0, "clipped_high_tokens": 1.0}
    sums |= {"mismatch_tokens": 5.0, "mismatch_kl_sum": 0.4, "mismatch_abs_sum": 0.8}
    by_age = {"age_tokens": [3.0, 0.0, 2.0], "age_clipped_tokens": [0.0, 0.0, 1.0]}
    by_age["age_ratio_sum"] = [sum(ratios.get(age, [])) for age in range(3)]
    by_age["age_ratio_squared_sum"] = [sum(w * w for w in ratios.get(age, [])) for age in range(3)]
    by_age["age_mismatch_kl_sum"] = [0.03, 0.0, 0.5]
    metrics = policy_metrics(sums | by_age)
    assert {name: value for name, value in metrics.items() if name.startswith("age/")} == pytest.approx(
        {
            "age/0/tokens_fraction": 0.6,
            "age/0/ratio": 1.0,
            "age/0/ess": 1.0,
            "age/0/clipped_fraction": 0.0,
            "age/0/mismatch_kl": 0.01,
            "age/2/tokens_fraction": 0.4,
            "age/2/ratio": 1.25,
            "age/2/ess": 2.5**2 / (2 * 4.25),
            "age/2/clipped_fraction": 0.5,
            "age/2/mismatch_kl": 0.25,
        }
    )
    nothing = policy_metrics(sums | {name: [0.0] * 3 for name in by_age})
    assert nothing == policy_metrics(sums) and not any(name.startswith("age/") for name in nothing)


def phases(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("pause", "wire", "apply", "acknowledge", "total"), seconds)


def test_pushes_are_reported_by_server_and_by_the_slowest():
    fleet = Fleet(["http://a:1", "http://b:2"], lambda url: Server(url, None))
    for server in fleet.servers:
        fleet.admit(server, 4)
    fleet.admit(fleet.servers[0], 5)
    servers = {"http://a:1": phases(1.0), "http://b:2": phases(2.0)}
    whole = SyncReport(4, 2**30, 3, {"gather": 0.5, "total": 2.5}, servers)
    newer = SyncReport(5, 2**30, 3, {"gather": 0.25, "total": 1.5}, {"http://a:1": phases(1.5)}, missed=1)
    alone = SyncReport(4, 2**30, 3, {"total": 9.0}, {"http://b:2": phases(9.0)}, alone=True)
    metrics = sync_metrics([whole, newer, alone], fleet)
    assert (metrics["sync/pushes"], metrics["sync/catch_ups"], metrics["sync/missed"]) == (2, 1, 1)
    assert (metrics["sync/version"], metrics["sync/servers_in_traffic"], metrics["sync/gib"]) == (4, 2, 1.0)
    assert (metrics["sync/gather_s"], metrics["sync/total_s"], metrics["sync/wire_s"]) == (0.25, 1.5, 9.0)
    assert (metrics["server/a_1/total_s"], metrics["server/b_2/total_s"]) == (1.5, 9.0)


def test_a_step_without_a_push_still_says_who_is_there():
    fleet = Fleet(["http://a:1"], lambda url: Server(url, None))
    fleet.withdraw(fleet.servers[0], "gone")
    metrics = sync_metrics([], fleet)
    assert (metrics["sync/pushes"], metrics["sync/servers_lost"], metrics["sync/version"]) == (0, 1, -1)
    assert not any(name.startswith("server/") for name in metrics)


def test_busy_share_leaves_out_standing_still_and_idle_servers_count():
    fleet = Fleet(["http://a:1", "http://b:2", "http://c:3"], lambda url: Server(url, None))
    for server in fleet.servers[:2]:
        fleet.admit(server, 4)
    stops = {"http://a:1": (98.0, 104.0), "http://b:2": (106.0, 109.0)}
    pushed = SyncReport(4, 2**30, 3, {"total": 2.0}, {url: phases(1.0) for url in stops}, stops=stops)
    busy = {"http://a:1": [(100.0, 101.0), [102.0, 107.0], (106.0, 110.0)], "http://b:2": []}  # of two processes
    metrics = server_metrics(fleet, busy, [pushed], 10.0)
    assert metrics == pytest.approx(
        {"server/a_1/busy_share": 0.6, "server/b_2/busy_share": 0.0, "server/busy_share": 0.3}
    )
    idle_when_stopped = server_metrics(fleet, {"http://b:2": [(101.0, 106.0)]}, [pushed], 10.0)
    assert idle_when_stopped["server/b_2/busy_share"] == pytest.approx(0.5), "the stop took nothing from it"
    assert server_metrics(fleet, {}, [], 0.0) == {}


def test_an_environments_tokens_have_no_age_and_are_no_answer_tokens():
    given = sample(1.0, 3)
    given.versions, given.loss_mask = [3, 0, 5], [True, False, True]
    metrics = rollout_metrics([[given]], [[1.0]], 5, 2)
    assert metrics["rollout/answer_tokens"] == 2
    assert metrics["rollout/age_max"] == 2
    assert sum(metrics[f"rollout/age_{age}_fraction"] for age in range(3)) == pytest.approx(1.0)
