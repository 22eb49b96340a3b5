"""Groups that several processes pack, against the same in one."""

import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from torchtitan.grpo.config.job_config import AsyncGrpo, Distill, Grpo, Rollout
from torchtitan.grpo.data.samples import Group, Prompt, Sample
from torchtitan.grpo.policy.packing import Layout
from torchtitan.grpo.reporting.step_metrics import answer_metrics
from torchtitan.grpo.rollouts.sampler_check import SamplerCheck
from torchtitan.grpo.run.packed import Counted, Packed

LAYOUT = Layout(row_tokens=64, ranks=2, multiple=8, attention_tokens=1000.0)
VERSION = 3


def groups_of(count: int) -> list[Group]:
    numbers = random.Random(0)
    groups = []
    for index in range(count):
        prompt = Prompt(index, [1] * numbers.randint(2, 6), "", source=f"source{index % 2}")
        group = []
        for _ in range(4):
            n = numbers.randint(1, 12)
            sample = Sample(prompt, numbers.choices(range(9), k=n), [-0.5] * n, [numbers.choice((2, 3))] * n, "stop")
            sample.reward = None if numbers.random() < 0.1 else numbers.choice((0.0, 1.0))
            sample.rewards = {"score": sample.reward or 0.0}
            sample.servers = [(0, f"http://server{numbers.randrange(3)}")]
            group.append(sample)
        groups.append(group)
    return groups


def rows_by_answer(packed: Packed, groups: list[Group]) -> list[tuple]:
    """Of each document, in any order: tokens, advantage, weight, and its tokens' servers."""
    names, found = list(packed.servers), []
    for minibatch in packed.minibatches:
        for row in (row for rows in minibatch for row in rows):
            first, of_documents = (
                0,
                np.add.reduceat(row.trained, np.cumsum([0, *row.lengths])[:-1]) if len(row.lengths) else [],
            )
            for k, trained in enumerate(of_documents):
                targets = row.targets[first : first + trained].tolist()
                servers = {names[i - 1] if i else "" for i in row.servers[first : first + trained].tolist()}
                found.append((targets, float(row.advantages[k]), float(row.weights[k]), sorted(servers)))
                first += trained
    return sorted(found)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_shares_are_packed_as_if_by_one(aggregation, minibatches):
    grpo = Grpo(loss_aggregation=aggregation, minibatches=minibatches, zero_variance_groups="keep")
    config = SimpleNamespace(
        grpo=grpo, rollout=Rollout(max_answer_tokens=12), async_grpo=AsyncGrpo(), distill=Distill()
    )
    check = SamplerCheck(config, None)
    groups = groups_of(12)
    of_shares = [groups[k::3] for k in range(3)]
    if minibatches > 1:  # a minibatch of the whole has the same part of each share
        parts = [[share[i : i + 2] for share in of_shares] for i in (0, 2)]
        groups = [group for part in parts for own in part for group in own]
    whole = Packed.of(groups, VERSION, config, check, LAYOUT)

    told = [Counted.of(share, VERSION, config, check).values() for share in of_shares]
    totals = Counted.sum([Counted(*msgspec.msgpack.decode(msgspec.msgpack.encode(each))) for each in told])
    assert sorted(totals.servers) == sorted(whole.servers)
    shares = [Packed.of(share, VERSION, config, check, LAYOUT, totals) for share in of_shares]
    found = sorted(row for share, own in zip(shares, of_shares, strict=True) for row in rows_by_answer(share, own))
    expected = rows_by_answer(whole, groups)
    assert [row[:2] + row[3:] for row in found] == [row[:2] + row[3:] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected])

    answers = msgspec.msgpack.decode(msgspec.msgpack.encode([group for share in shares for group in share.answers]))
    rewards = [group for share in shares for group in share.rewards]
    metrics, reference = answer_metrics(answers, rewards, 0), answer_metrics(whole.answers, whole.rewards, 0)
    assert metrics == pytest.approx(reference)
    sums = [sum(each) for each in zip(*(share.sums for share in shares), strict=True)]
    assert sums[1] - sums[0] + sums[2] == whole.sums[1] - whole.sums[0] + whole.sums[2], "tokens but for padding"
    assert all(len({len(rows) for rows in minibatch}) == 1 for share in shares for minibatch in share.minibatches)


def test_a_server_is_of_the_newest_version_if_any_share_says_so():
    one, other = Counted([(1, 5)], {"a": False, "b": True}), Counted([(2, 7)], {"a": True, "c": False})
    assert Counted.sum([one, other]) == Counted([(3, 12)], {"a": True, "b": True, "c": False})
