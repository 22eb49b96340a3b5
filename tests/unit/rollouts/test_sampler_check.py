"""Which tokens are compared with which server, and what becomes of a server that differs."""

import math
from dataclasses import replace

import pytest
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.engines.vllm_control import VllmControl
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy.sums import by_server, surprise_values
from torchtitan.grpo.rollouts.sampler_check import ONE_SIDED, TOKENS_MIN, SamplerCheck

A, B, C = "http://a:8000", "http://b:8000", "http://c:8000"


def fleet_of(*urls: str, min_servers: int = 1) -> Fleet:
    fleet = Fleet(list(urls), lambda url: Server(url, VllmControl(url)), min_servers)
    for server in fleet.servers:
        fleet.admit(server, 3)
    return fleet


def config_of(max_age: int = 0, kv_kept: bool = False) -> JobConfig:
    config = JobConfig()
    ahead = {"max_trajectory_age_steps": max_age, "recompute_kv_cache_after_weight_updates": not kv_kept}
    config.async_grpo = replace(config.async_grpo, enabled=max_age > 0, **ahead)
    return config


def sums(**means: float | tuple[float, int] | list) -> tuple[list[str], dict[str, list[float]]]:
    """Each server's mean or (mean, tokens), or a list of these by age, as `sums.by_server` over all ranks."""
    by_age = [value if isinstance(value, list) else [value] for value in means.values()]
    pairs = [value if isinstance(value, tuple) else (value, TOKENS_MIN) for values in by_age for value in values]
    totals = [mean * n for mean, n in pairs]
    by_server = {"server_tokens": [n for _, n in pairs], "server_mismatch_abs_sum": totals}
    by_server |= {"server_bounded_sum": totals, "server_excess_sum": [total * ONE_SIDED / 2 for total in totals]}
    return [{"a": A, "b": B, "c": C}[name] for name in means], by_server


def sample(versions: list[int], servers: list[tuple[int, str]], loss_mask: list[bool] | None = None) -> Sample:
    n = len(versions)
    return Sample(Prompt(0, [5], ""), [7] * n, [-1.0] * n, versions, "stop", loss_mask, servers=servers)


def test_each_token_is_compared_with_its_own_server():
    check = SamplerCheck(config_of(max_age=1), None)
    groups = [
        [sample([3, 3, 3], [(0, B)]), sample([2, 2], [(0, C)])],
        [sample([2, 3, 3, 3, 3], [(0, B), (2, A)], [True, True, True, False, True])],
        [sample([3], [(0, "")]), sample([3], [])],
    ]
    servers = check.servers(groups, 3)
    assert servers == {B: True, C: False, A: True}
    numbers = [check.token_servers(servers, sample).tolist() for group in groups for sample in group]
    assert numbers == [[1, 1, 1], [2, 2], [1, 1, 3, 3, 3], [0], [0]]
    assert (
        check.servers(groups, 4) == dict.fromkeys(servers, False)
        and check.token_servers([], groups[0][0]).tolist() == []
    )
    # A turn that was cut off with what is beyond the longest answer
    assert check.token_servers([A, B], sample([3, 3], [(0, A), (2, B)])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("versions", "servers", "loss_mask", "numbers", "of_3"),
    [
        ([3, 3], [(0, A)], None, [1, 1], {A: True}),
        ([2, 2], [(0, A)], None, [1, 1], {A: False}),
        ([2, 2, 3, 3], [(0, A)], None, [1, 1, 0, 0], {A: False}),
        ([3, 2, 3], [(0, A)], None, [1, 0, 0], {A: True}),
        # An environment's tokens come first, and then between two turns
        ([0, 0, 3, 3, 3, 4], [(2, A)], [False, False, True, True, False, True], [0, 0, 1, 1, 1, 0], {A: True}),
        ([0, 2, 2], [(1, A)], [False, True, True], [0, 1, 1], {A: False}),
        ([0, 0], [], [False, False], [0, 0], {}),
        ([], [(0, A)], None, [], {}),
        ([3, 3, 3, 4], [(0, A), (2, B)], None, [1, 1, 2, 0], {A: True, B: True}),
        ([2, 2, 3, 3], [(0, A), (2, B)], None, [1, 1, 0, 0], {A: False}),
        ([2, 3, 3, 3], [(0, A), (2, B)], None, [1, 0, 0, 0], {A: False}),
    ],
)
def test_with_old_keys_and_values_tokens_are_compared_up_to_another_version(
    versions, servers, loss_mask, numbers, of_3
):
    check = SamplerCheck(config_of(max_age=1, kv_kept=True), None)
    answer = sample(versions, servers, loss_mask)
    assert check.servers([[answer]], 3) == of_3
    assert check.token_servers([A, B], answer).tolist() == numbers
    assert check.token_servers([], answer).tolist() == []


def test_older_tokens_are_compared_with_those_of_the_other_servers():
    """The policy has moved by 0.9 nat within a version; a resumed run starts with such tokens."""
    fleet = fleet_of(A, B, C)
    a, b, c = fleet.servers
    check = SamplerCheck(config_of(max_age=1), fleet)
    check.before_first_step(*sums(a=[(0.0, 0), 0.9], b=[(0.0, 0), 0.9]))
    assert check.is_due, "no token of the trained version: the next step may have some"
    check.after_step(*sums(a=[0.01, 0.9], b=[(0.0, 0), 1.9], c=[(0.0, 0), (3.0, 1)]))
    assert a.in_traffic and b.in_traffic and c.in_traffic
    check.after_step(*sums(a=[(0.0, 0), 1.0], b=[(0.0, 0), 2.3]))
    assert a.in_traffic and not b.in_traffic and b.distrusted
    fleet.withdraw(b, "connecting again")
    fleet.admit(b, 4)
    for _ in range(2):  # answers from before it left
        check.after_step(*sums(a=[0.0, 1.0], b=[(0.0, 0), 4.0]))
        assert b.in_traffic
    for _ in range(3):
        check.after_step(*sums(a=[(0.0, 0), 2.0]))  # nobody to compare with
    assert a.in_traffic


def test_older_tokens_are_compared_step_by_step():
    """The policy stands still in one step and moves far in the next; each server has few tokens in one of them."""
    half = TOKENS_MIN // 2
    fleet = fleet_of(A, B)
    check = SamplerCheck(config_of(max_age=1), fleet)
    for _ in range(20):
        check.after_step(*sums(a=[(0.0, 0), (0.0, half)], b=[(0.0, 0), (0.0, 1)]))
        check.after_step(*sums(a=[(0.0, 0), (1.0, 1)], b=[(0.0, 0), (1.0, half)]))
    assert all(server.in_traffic for server in fleet.servers)


def test_older_tokens_end_no_run(caplog):
    fleet = fleet_of(A, B, min_servers=2)
    SamplerCheck(config_of(max_age=1), fleet).after_step(*sums(a=[(0.0, 0), 0.1], b=[(0.0, 0), 0.5]))
    assert all(server.in_traffic for server in fleet.servers)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"0.500 nat on average at {B}" in said and said.endswith("Too few other servers are left to do without")


@pytest.mark.parametrize("servers", [1, 2])
def test_older_tokens_that_no_policy_could_move_so_far_from_warn_and_then_end_the_run(servers, caplog):
    """With one server nobody tells how far the policy has moved, and of two both may be wrong."""
    fleet = fleet_of(A, B, min_servers=1) if servers == 2 else fleet_of(A)
    check = SamplerCheck(config_of(max_age=1), fleet)

    def step(mean: float) -> None:
        check.after_step(*sums(**{name: [(0.0, 0), mean] for name in "ab"[:servers]}))

    def judged(mean: float) -> None:
        for _ in range(3):  # for two steps after it was over, answers may be from before
            step(mean)

    for mean in (3.0, 0.1, 3.0):  # the second time it is better
        judged(mean)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and all("differ by 3.000 nat on average at http://a" in each for each in said)
    with pytest.raises(UserError, match=rf"differ by 3333.000 nat on average at {A}.* over \[rollout\] max_logprob"):
        judged(3333.0)
    assert all(server.in_traffic for server in fleet.servers)


@pytest.mark.parametrize("bad", [0.3, math.nan, math.inf])
def test_before_the_first_step_the_run_ends_if_no_server_agrees(bad):
    check = SamplerCheck(config_of(), None)  # as on every rank
    check.before_first_step(*sums(a=(0.0, 0), b=(0.0, 0)))
    assert check.is_due, "nothing has a weight"
    check.before_first_step(*sums(a=(0.19, 3), b=(bad, 3)))
    assert not check.is_due
    with pytest.raises(UserError, match=rf"differ by {bad:.3f} nat on average at {A}, {bad:.3f} .* at {B}, over"):
        check.before_first_step(*sums(a=(bad, 3), b=(bad, 3), c=(0.0, 0)))


def test_a_model_that_fp8_rounds_too_much(caplog):
    config = config_of()
    for quantization, mean, warns in (("none", 0.15, False), ("fp8", 0.07, False), ("fp8", 0.15, True)):
        config.rollout = replace(config.rollout, quantization=quantization)
        for fleet in (fleet_of(A), None):
            caplog.clear()
            SamplerCheck(config, fleet).before_first_step(*sums(a=mean))
            assert ("servers in fp8 differ from the policy by 0.150 nat" in caplog.text) == (
                warns and fleet is not None
            )


def test_a_server_that_drifts_leaves_traffic_until_it_was_fed_again(caplog):
    fleet = fleet_of(A, B)
    a, b = fleet.servers
    check = SamplerCheck(config_of(), fleet)
    check.after_step(*sums(a=0.19, b=0.01))
    check.after_step([], {})
    assert a.in_traffic and b.in_traffic
    check.after_step(*sums(a=0.21, b=0.01))
    assert a.lost and a.distrusted and not a.in_traffic and b.in_traffic
    fleet.admit(a, 4)  # a push that was under way has ended
    assert not a.in_traffic
    fleet.withdraw(a, a.reason)  # to be connected again
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"{A} is lost: ") and f"0.210 nat on average at {A}, over" in said and B not in said
    fleet.admit(a, 4)
    assert a.in_traffic and a.distrusts == 1
    check.after_step(*sums(a=3.0, b=0.01))  # sampled before it left
    assert a.in_traffic
    check.after_step(*sums(a=3.0, b=0.01))
    assert a.distrusts == 2 and not a.in_traffic


def test_few_tokens_add_up_over_steps_and_what_is_not_finite_judges_nobody():
    fleet = fleet_of(A, B)
    a, _ = fleet.servers
    check = SamplerCheck(config_of(), fleet)
    for _ in range(3):
        check.after_step(*sums(a=(0.5, TOKENS_MIN // 4), b=(math.nan, TOKENS_MIN)))
        assert a.in_traffic
    check.after_step(*sums(a=(0.5, TOKENS_MIN // 4)))
    assert not a.in_traffic and fleet.servers[1].in_traffic


@pytest.mark.parametrize(("urls", "min_servers"), [([A], 1), ([A, B], 2)])
def test_the_run_ends_if_too_few_servers_would_be_left(urls, min_servers):
    check = SamplerCheck(config_of(), fleet_of(*urls, min_servers=min_servers))
    with pytest.raises(UserError, match=rf"differ by 0.500 nat on average at {A}, over \[rollout\] max_logprob_mism"):
        check.after_step(*sums(a=0.5))
    SamplerCheck(config_of(), None).after_step(*sums(a=0.5))  # rank 0 alone knows the fleet


def test_a_server_that_samples_from_a_part_of_the_vocabulary():
    """It finds every token a little likelier. Rounding does so with half of them, other weights with more."""
    fleet = fleet_of(A, B)
    check = SamplerCheck(config_of(), fleet)

    def step(share: float, mean: float = 0.05, tokens: int = TOKENS_MIN) -> None:
        servers, by_server = sums(a=(mean, tokens), b=0.01)
        by_server["server_excess_sum"][0] = share * by_server["server_bounded_sum"][0]
        check.after_step(servers, by_server)

    step(0.7)
    step(1.0, mean=0.009)
    step(1.0, tokens=TOKENS_MIN - 1)
    assert all(server.in_traffic for server in fleet.servers)
    step(0.9)
    a, b = fleet.servers
    assert a.distrusted and b.in_traffic
    assert "answers of http://a:8000 are not draws from the policy: check that" in a.reason


def drawn(entropy: float, surprise: float, deviation: float, tokens: int = 20_000) -> dict[str, list[float]]:
    """Of one server's tokens of age 0: means, and the standard deviation of the surprise."""
    squared = surprise**2 + deviation**2
    means = {"drawn_tokens": 1.0, "entropy_sum": entropy, "surprise_sum": surprise, "surprise_squared_sum": squared}
    return {f"server_{name}": [mean * tokens] for name, mean in means.items()}


@pytest.mark.parametrize(
    "means",
    [
        dict(entropy=1.0, surprise=-0.19, deviation=0.1),  # under the limit, and under a quarter of the entropy
        dict(entropy=0.1, surprise=-0.024, deviation=0.01),
        dict(entropy=1.0, surprise=-0.4, deviation=8.0),  # seven standard errors
        dict(entropy=1.0, surprise=0.9, deviation=0.1),
        dict(entropy=0.002, surprise=-0.002, deviation=0.0001),  # 40 nat in all: no rare token was drawn
    ],
)
def test_tokens_that_may_be_drawn_from_the_policy(means):
    fleet = fleet_of(A)
    servers, by_server = sums(a=0.0)
    SamplerCheck(config_of(), fleet).after_step(servers, by_server | drawn(**means))
    assert fleet.servers[0].in_traffic


@pytest.mark.parametrize("means", [dict(entropy=5.4, surprise=-0.6, deviation=0.9), dict(entropy=0.1, surprise=-0.03)])
def test_tokens_that_are_likelier_than_the_policys(means):
    """As with top-p on a server whose log-probabilities are of the whole vocabulary."""
    config = config_of()
    check = SamplerCheck(config, fleet_of(A))
    servers, by_server = sums(a=0.0)
    by_server |= drawn(**{"deviation": 0.01, **means})
    check.after_step(servers, by_server, has_rewards=False)  # answers that are left out may be the unlikely ones
    with pytest.raises(
        UserError, match=rf"of {A} are not draws .*: {A}: sampling mask or temperature: .* -[0-9.]+ nat"
    ):
        check.after_step(servers, by_server)
    config.rollout = replace(config.rollout, max_logprob_mismatch=2.0)
    SamplerCheck(config, fleet_of(A)).after_step(servers, by_server | drawn(entropy=1.0, surprise=-0.99, deviation=0.0))


def test_draws_from_an_almost_certain_policy_are_never_accused():
    """Its rare tokens are missing in many a step, and then every token is likelier than on average."""
    generator = torch.Generator().manual_seed(0)
    check = SamplerCheck(config_of(), fleet_of(A))
    for certain in (1e-4, 1e-3, 1e-2):
        odds = torch.cat([torch.tensor([1 - certain]), certain / torch.arange(1, 1000) / 7.48]).double()
        logprobs = (odds / odds.sum()).log()
        entropy = -(logprobs.exp() * logprobs).sum()
        for n in (300, 3000, 30_000):
            for _ in range(30):
                tokens = torch.multinomial(odds, n, replacement=True, generator=generator)
                ones, zeros = torch.ones(n), torch.zeros(n, dtype=torch.int64)
                own = by_server(surprise_values(logprobs[tokens], entropy.expand(n)), ones, zeros, 0, zeros + 1, 1)
                servers, of_servers = sums(a=0.0)
                check.after_step(servers, of_servers | {name: value.tolist() for name, value in own.items()})


@pytest.mark.parametrize(
    "change", [{"overlong_filter": True}, {"zero_variance_groups": "drop"}, {"environment": "own:rollout"}]
)
def test_answers_that_are_selected_say_nothing_of_the_draws(change):
    config = config_of()
    section = config.rollout if "environment" in change else config.grpo
    changed = replace(section, **change)
    config.grpo, config.rollout = (changed, config.rollout) if section is config.grpo else (config.grpo, changed)
    servers, by_server = sums(a=0.0)
    for check in (SamplerCheck(config, fleet_of(A)), SamplerCheck(config_of(max_age=1), fleet_of(A))):
        check.after_step(servers, by_server | drawn(entropy=1.0, surprise=-0.9, deviation=0.1))


def test_the_worst_servers_are_asked_why_and_more_seldom_each_time():
    asked = []

    def explain(server: str) -> str:
        asked.append(server)
        return f"cause {len(asked)}"

    fleet = fleet_of(A, B, C)
    check = SamplerCheck(config_of(), fleet)
    check.explain = explain
    check.after_step(*sums(a=0.1, b=0.9, c=0.1))
    assert asked == [B] and "= 0.2: http://b:8000: cause 1 (docs/by_symptom" in fleet.servers[1].reason
    with pytest.raises(UserError, match=rf"max_logprob_mismatch = 0.2: {B}: cause 2; {C}: cause 3 \(docs/by_symptom"):
        check.before_first_step(*sums(a=0.3, b=0.9, c=0.8))
    for _ in range(4):
        with pytest.raises(UserError):
            check.before_first_step(*sums(b=0.9))
    assert asked == [B, B, C, B], "the fourth time, not the third, fifth and sixth"
