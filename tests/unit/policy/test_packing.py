import dataclasses
import itertools
import math
import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from tests.helpers.microbatches import Spread, assert_equal
from torchtitan.grpo.data.kept_tokens import KeptTokens
from torchtitan.grpo.data.samples import TopTokens
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.policy import assignment
from torchtitan.grpo.policy.assignment import MOST_COPIES, _fill_rows, groups_by_prompt
from torchtitan.grpo.policy.microbatch import Microbatch, _move
from torchtitan.grpo.policy.packing import pack, packing_fractions, packing_sums
from torchtitan.grpo.policy.rows import PADDING_DOCUMENT_TOKENS, PackedRow, PackedSample, from_bytes, to_bytes


def sample(prompt_tokens: int, answer_tokens: int, seed: int = 0) -> PackedSample:
    rng = random.Random(seed * 10007 + prompt_tokens * 101 + answer_tokens)
    return PackedSample(
        prompt_ids=[rng.randrange(1, 500) for _ in range(prompt_tokens)],
        answer_ids=[rng.randrange(1, 500) for _ in range(answer_tokens)],
        advantage=rng.uniform(-1, 1),
        weight=rng.uniform(0.1, 1),
        sampler_logprobs=[-rng.random() for _ in range(answer_tokens)],
        ages=[rng.randrange(4) for _ in range(answer_tokens)],
        servers=[rng.randrange(3) for _ in range(answer_tokens)],
    )


def random_samples(count: int, longest: int, seed: int) -> list[PackedSample]:
    rng = random.Random(seed)
    return [sample(rng.randint(1, longest // 2), rng.randint(1, longest // 2), i) for i in range(count)]


def unpack(microbatches: list[list[PackedRow]]) -> dict[int, PackedSample]:
    """Read every sample back from the rows, by the documented meaning of the fields alone."""
    found: dict[int, PackedSample] = {}
    for row in (Spread(row) for rank in microbatches for row in rank):
        bounds = row.cu_seqlens.tolist()
        for k, index in enumerate(row.samples.tolist()):
            document = slice(bounds[k], bounds[k + 1])
            assert (row.sample_ids[document] == k).all()
            shared = int(row.positions[bounds[k]])
            if not shared:
                whole = bounds[k]
            mask = row.trained[document]
            first = int(mask.nonzero()[0][0])
            assert mask[first:].all()
            tokens, targets = row.tokens[document], row.targets[document]
            assert np.array_equal(targets[first:-1], tokens[first + 1 :])  # targets are the document's next tokens
            (advantage,) = set(row.advantages[document][mask].tolist())
            (weight,) = set(row.weights[document][mask].tolist())
            assert index not in found
            found[index] = PackedSample(
                row.tokens[whole : whole + shared].tolist() + tokens[: first + 1].tolist(),
                targets[mask].tolist(),
                advantage,
                weight,
                row.sampler_logprobs[document][mask].tolist(),
                row.ages[document][mask].tolist(),
                servers=row.servers[document][mask].tolist(),
            )
    return found


def check_rows(microbatches: list[list[PackedRow]], budget_tokens: int, pad_multiple: int) -> None:
    assert len({len(rank) for rank in microbatches}) == 1
    for row in (row for rank in microbatches for row in rank):
        length = len(row.tokens)
        assert 0 < length <= budget_tokens and length % pad_multiple == 0
        bounds = row.cu_seqlens.tolist()
        assert row.cu_seqlens.dtype == np.int32 and bounds[0] == 0 and bounds[-1] == length
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        microbatch, row = Microbatch.of(row, "cpu"), Spread(row)
        assert microbatch.max_seqlen == max(lengths)
        documents, padding = lengths[: len(row.samples)], lengths[len(row.samples) :]
        assert row.lengths.tolist() == documents
        expected = [shared + p for n, shared in zip(documents, row.shared.tolist(), strict=True) for p in range(n)]
        longest = max(expected, default=0) + 1
        expected += [min(p, max(longest - 1, 1)) for n in padding for p in range(n)]  # within the model's table
        assert row.positions.tolist() == expected
        assert all(n <= PADDING_DOCUMENT_TOKENS for n in padding)
        assert (row.sample_ids == -1).sum() == sum(lengths[len(row.samples) :])
        off = ~row.trained
        for values in (row.targets, row.advantages, row.weights, row.sampler_logprobs, row.ages):
            assert (values[off] == 0).all()
        assert not row.trained[row.sample_ids == -1].any()
        assert microbatch.answer_positions.tolist() == row.trained.nonzero()[0].tolist()
        for name in ("targets", "sample_ids", "ages", "servers", "advantages", "weights", "sampler_logprobs"):
            expected, found = getattr(row, name)[row.trained], getattr(microbatch, name)
            assert found.tolist() == expected.tolist(), name
            assert found.dtype == (torch.float32 if expected.dtype == np.float32 else torch.int64), name


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("pad_multiple", [1, 8, 64])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_every_sample_comes_back_once(num_ranks, pad_multiple, count):
    samples = random_samples(count, longest=40, seed=count)
    packed = pack(samples, 64, num_ranks, pad_multiple)
    check_rows(packed, 64, pad_multiple)
    found = unpack(packed)
    assert sorted(found) == list(range(count))
    for i, expected in enumerate(samples):
        assert found[i].prompt_ids == expected.prompt_ids and found[i].answer_ids == expected.answer_ids
        assert found[i].advantage == pytest.approx(expected.advantage)
        assert found[i].weight == pytest.approx(expected.weight)
        assert found[i].sampler_logprobs == pytest.approx(expected.sampler_logprobs)
        assert found[i].ages == expected.ages and found[i].servers == expected.servers


def test_exact_row():
    (rows,) = pack([PackedSample([1, 2], [3, 4], 0.5, 0.25, [-1.0, -2.0], [2, 1])], 8, 1, pad_multiple=4)
    row = Spread(*rows)
    assert row.tokens.tolist() == [1, 2, 3, 0]
    assert row.targets.tolist() == [0, 3, 4, 0]
    assert row.trained.tolist() == [False, True, True, False]
    assert row.positions.tolist() == [0, 1, 2, 0]
    assert row.sample_ids.tolist() == [0, 0, 0, -1]
    assert row.cu_seqlens.tolist() == [0, 3, 4]
    assert row.advantages.tolist() == [0, 0.5, 0.5, 0]
    assert row.weights.tolist() == [0, 0.25, 0.25, 0]
    assert row.sampler_logprobs.tolist() == [0, -1, -2, 0]
    assert row.ages.tolist() == [0, 2, 1, 0]
    assert row.servers.tolist() == [-1, 0, 0, -1]


def test_tokens_of_an_environment_are_context():
    """A tool's result in the middle and at the end; log-probabilities and ages given for it are of no account."""
    mask = [True, False, False, True, False]
    answer = PackedSample([1, 2], [3, 4, 5, 6, 7], 0.5, 0.25, [-1.0, -9.0, -9.0, -2.0, -9.0], [2, 9, 9, 1, 9], mask)
    ((row,),) = pack([answer], 8, 1, pad_multiple=8)
    row = Spread(row)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]  # 7 predicts nothing, 6 is only predicted
    assert row.targets.tolist() == [0, 3, 0, 0, 6, 0, 0, 0]
    assert row.trained.tolist() == [False, True, False, False, True, False, False, False]
    assert row.cu_seqlens.tolist() == [0, 5, 8]
    assert row.weights.tolist() == [0, 0.25, 0, 0, 0.25, 0, 0, 0]
    assert row.advantages.tolist() == [0, 0.5, 0, 0, 0.5, 0, 0, 0]
    assert row.sampler_logprobs.tolist() == [0, -1, 0, 0, -2, 0, 0, 0]
    assert row.ages.tolist() == [0, 2, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("pad_multiple", [1, 32])
def test_masked_and_whole_answers_in_the_same_rows(pad_multiple):
    """Every trained token comes back where the text before it is its whole context, and no other does."""
    rng = random.Random(4)
    samples = random_samples(30, longest=40, seed=2)
    for s in samples[::2]:
        s.loss_mask = [rng.random() < 0.3 for _ in s.answer_ids]
    for s in samples[::5]:
        s.ages = []
    packed = pack(samples, 64, 2, pad_multiple)
    check_rows(packed, 64, pad_multiple)
    left_out = {i for i, s in enumerate(samples) if s.loss_mask is not None and not any(s.loss_mask)}
    seen = []
    for row in map(Spread, itertools.chain(*packed)):
        for k, index in enumerate(row.samples.tolist()):
            s, document = samples[index], slice(*row.cu_seqlens[k : k + 2].tolist())
            expected = []
            for j, trained in enumerate(s.loss_mask or [True] * len(s.answer_ids)):
                if trained:
                    at = len(s.prompt_ids) + j - 1
                    age = s.ages[j] if s.ages else 0
                    expected.append((at, s.answer_ids[j], pytest.approx(s.sampler_logprobs[j]), age))
                    context = [*s.prompt_ids, *s.answer_ids[:j]]
                    assert row.tokens[document][: at + 1].tolist() == context
            at = row.trained[document].nonzero()[0]
            values = (v[document][at].tolist() for v in (row.targets, row.sampler_logprobs, row.ages))
            assert list(zip(at.tolist(), *values, strict=True)) == expected
            assert int(at[-1]) + 1 == document.stop - document.start  # nothing after the last trained token
            assert row.weights[document][at].tolist() == pytest.approx([s.weight] * len(expected))
            assert row.advantages[document][at].tolist() == pytest.approx([s.advantage] * len(expected))
            seen.append(index)
    assert left_out and sorted(seen) == sorted(set(range(30)) - left_out)
    for rows in packed:
        assert_equal(rows, from_bytes(to_bytes(rows)))


def test_one_trained_token():
    for mask in ([True], [True, False, False], [False, False, True]):
        n = len(mask)
        ((row,),) = pack([PackedSample([8], list(range(1, n + 1)), 1.0, 1.0, [-1.0] * n, [3] * n, mask)], 8, 1)
        last = mask.index(True)
        assert row.tokens.tolist() == [8, *range(1, last + 1)]
        assert row.trained.tolist() == [False] * last + [True]
        assert row.targets.tolist() == [last + 1] and row.ages.tolist() == [3]


def test_an_answer_without_a_trained_token_is_left_out():
    masked = PackedSample([1] * 50, [2] * 50, 1.0, 1.0, [0.0] * 50, [1] * 50, [False] * 50)
    empty = PackedSample([1], [], 1.0, 1.0, [], [], [])
    ((row,),) = pack([masked, sample(3, 2), empty], 8, 1)  # too long for a row, but needs none
    assert row.samples.tolist() == [1] and row.trained.sum() == 2
    ((row,),) = pack([masked, empty], 8, 1, pad_multiple=8)
    assert len(row.tokens) == 8 and not row.trained.any() and (row.sample_ids == -1).all()


def test_tokens_after_the_last_trained_one_take_no_budget():
    s = sample(5, 8)
    s.loss_mask = [True] * 4 + [False] * 4
    ((row,),) = pack([s], 8, 1)
    assert len(row.tokens) == 8 and row.trained.sum() == 4
    s.loss_mask[-1] = True
    with pytest.raises(UserError, match=r"sample 0 takes 12 tokens \(prompt 5, answer 8, less the last\)"):
        pack([s], 8, 1)


def test_sample_at_the_budget_fits_and_one_over_does_not():
    # the last answer token is only a target: 5 + 4 tokens take 8 positions
    ((row,),) = pack([sample(5, 4)], 8, 1)
    assert len(row.tokens) == 8 and row.trained.sum() == 4
    with pytest.raises(UserError, match=r"\[training\] tokens_per_microbatch"):
        pack([sample(1, 1), sample(5, 5)], 8, 1)


def test_budget_must_be_a_multiple_of_the_padding():
    with pytest.raises(UserError, match=r"\[training\] tokens_per_microbatch"):
        pack([], 100, 1, pad_multiple=64)


def test_no_samples_give_every_rank_a_row_of_padding():
    for packed in (pack([], 64, 3, 8), pack([sample(4, 0)], 64, 3, 8)):
        check_rows(packed, 64, 8)
        assert [len(rank) for rank in packed] == [1, 1, 1]
        assert not any(rank[0].trained.any() or len(rank[0].samples) for rank in packed)


def test_more_ranks_than_samples():
    packed = pack([sample(3, 3), sample(2, 2)], 64, 4)
    check_rows(packed, 64, 1)
    assert sorted(len(rank[0].samples) for rank in packed) == [0, 0, 1, 1]


def test_bad_samples_are_errors():
    with pytest.raises(ValueError, match="empty prompt"):
        pack([PackedSample([], [1], 0.0, 1.0, [0.0])], 8, 1)
    with pytest.raises(ValueError, match="2 sampler log-probabilities for 1"):
        pack([PackedSample([1], [1], 0.0, 1.0, [0.0, 0.0])], 8, 1)
    with pytest.raises(ValueError, match="1 ages for 2"):
        pack([PackedSample([1], [1, 2], 0.0, 1.0, [0.0, 0.0], [0])], 8, 1)
    with pytest.raises(ValueError, match="1 servers for 2"):
        pack([PackedSample([1], [1, 2], 0.0, 1.0, [0.0, 0.0], servers=[1])], 8, 1)
    with pytest.raises(ValueError, match="3 loss mask values for 2"):
        pack([PackedSample([1], [1, 2], 0.0, 1.0, [0.0, 0.0], loss_mask=[True] * 3)], 8, 1)
    with pytest.raises(ValueError, match="0 loss mask values for 1"):
        pack([PackedSample([1], [1], 0.0, 1.0, [0.0], loss_mask=[])], 8, 1)


def test_ranks_are_balanced_and_turns_are_even():
    samples = random_samples(400, longest=200, seed=3)
    packed = pack(samples, 2048, 4)
    tokens = [[len(row.tokens) for row in rank] for rank in packed]
    per_rank = [sum(rank) for rank in tokens]
    assert max(per_rank) <= 1.02 * min(per_rank)
    for turn in zip(*tokens, strict=True):
        assert max(turn) <= 1.05 * min(turn)
    total = sum(len(s.prompt_ids) + len(s.answer_ids) - 1 for s in samples)
    assert len(packed[0]) == -(-total // (2048 * 4))  # no more rows than the tokens need


def test_as_few_rows_as_either_way_of_packing_finds():
    # first fit: 5 + 5, 4 + 4 + 3, 3; least loaded: 5 + 4 + 3 twice
    # first fit: 6 + 4, 4 + 3 + 3; least loaded: 6 + 3, 4 + 4, and no room for the last 3
    for lengths, budget_tokens in ((5, 5, 4, 4, 3, 3), 12), ((6, 4, 4, 3, 3), 10):
        packed = pack(by_lengths(*lengths), budget_tokens, 1)
        check_rows(packed, budget_tokens, 1)
        assert [len(row.tokens) for row in packed[0]] == [budget_tokens, budget_tokens]
        assert sorted(unpack(packed)) == list(range(len(lengths)))


def least_loaded_of_all_rows(order, lengths, loads, budget_tokens, num_rows):
    rows, room, load = [[] for _ in range(num_rows)], [budget_tokens] * num_rows, [0] * num_rows
    for i in order:
        able = [row for row in range(num_rows) if room[row] >= lengths[i]]
        if not able:
            return []
        row = min(able, key=load.__getitem__)
        rows[row].append(i)
        room[row] -= lengths[i]
        load[row] += loads[i]
    return rows


def first_of_all_rows(order, lengths, budget_tokens):
    rows = []
    for i in order:
        able = (row for row in rows if sum(lengths[k] for k in row) + lengths[i] <= budget_tokens)
        if (row := next(able, None)) is None:
            rows.append(row := [])
        row.append(i)
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_the_same_rows_as_when_each_sample_looks_at_all_rows(monkeypatch, seed):
    """With a teacher, routes and masks the lengths say the same: `assign` knows nothing else of samples."""
    rng = random.Random(seed)
    budget_tokens, number = rng.choice([64, 512, 2048]), rng.choice([1, 20, 80])
    sigma, mean = rng.choice([0.1, 0.8, 2.0]), rng.uniform(1.0, math.log(budget_tokens))
    samples: list[PackedSample] = []
    while len(samples) < number:
        shared, prompt = rng.choice([1, 1, 2, 8, 30]), sample(rng.randint(1, budget_tokens // 4), 1, len(samples))
        for _ in range(shared):
            tokens = min(budget_tokens - len(prompt.prompt_ids) + 1, max(1, int(rng.lognormvariate(mean, sigma))))
            samples.append(PackedSample(prompt.prompt_ids, [1] * tokens, 0.0, 1.0, [0.0] * tokens))
    groups = groups_by_prompt(samples, range(len(samples)))
    if rng.random() < 0.3:
        groups = [assignment.Part([i], 0) for i in range(len(samples))]
    lengths = {i: each.document_tokens for i, each in enumerate(samples)}
    costs = rng.choice([1, 8, budget_tokens]), rng.choice([20.0, 3000.0, math.inf])
    rows = assignment.assign(groups, lengths, budget_tokens, num_ranks := rng.choice([1, 2, 3, 8]), *costs)
    monkeypatch.setattr(assignment, "_least_loaded", least_loaded_of_all_rows)
    monkeypatch.setattr(assignment, "_first_fit", first_of_all_rows)
    assert rows == assignment.assign(groups, lengths, budget_tokens, num_ranks, *costs)


def by_lengths(*lengths: int) -> list[PackedSample]:
    return [sample(n, 1, seed=i) for i, n in enumerate(lengths)]


def row_costs(packed: list[list[PackedRow]], attention_tokens: float) -> list[list[float]]:
    """By turn and rank, from the lengths of the documents alone."""
    turns = [[np.diff(row.cu_seqlens).tolist() for row in turn] for turn in zip(*packed, strict=True)]
    return [[sum(n + n * n / (2 * attention_tokens) for n in row) for row in turn] for turn in turns]


@pytest.mark.parametrize("pad_multiple", [1, 64, 1024])
@pytest.mark.parametrize("attention_tokens", [50.0, 1000.0, 1e9, math.inf])
def test_rows_by_cost_hold_every_sample_in_no_more_rows(pad_multiple, attention_tokens):
    rng = random.Random(5)
    samples = by_lengths(*(min(1024, int(rng.lognormvariate(4.5, 1))) for _ in range(120)))
    by_tokens = pack(samples, 1024, 2, pad_multiple)
    packed = pack(samples, 1024, 2, pad_multiple, attention_tokens)
    check_rows(packed, 1024, pad_multiple)
    assert sorted(unpack(packed)) == list(range(120))
    assert len(packed[0]) <= len(by_tokens[0])
    duration = lambda rows: sum(map(max, row_costs(rows, attention_tokens)))  # noqa: E731
    # the attention of padding is measured here and not foreseen there
    assert duration(packed) <= duration(by_tokens) * (1 + 1e-9 if pad_multiple == 1 else 1.05)


def test_long_documents_are_spread_by_their_attention():
    """One of 64 tokens costs what eight of 16 do, not four."""
    samples = by_lengths(64, *[16] * 20)
    per_rank = [np.diff(row.cu_seqlens).tolist() for (row,) in pack(samples, 512, 2)]
    assert sum(per_rank[0]) == sum(per_rank[1])  # 192 tokens each
    (costs,) = row_costs(pack(samples, 512, 2), 16)
    assert max(costs) > 1.25 * min(costs)
    (costs,) = row_costs(pack(samples, 512, 2, attention_tokens=16), 16)
    assert max(costs) <= 1.1 * min(costs)


def test_rows_of_one_length_are_balanced_by_attention_alone():
    """Padding makes their tokens equal: what is left to even out is 120 against twelve times 16."""
    packed = pack(by_lengths(120, *[16] * 12), 256, 2, 256, attention_tokens=200)
    documents = [np.diff(row.cu_seqlens).tolist()[: len(row.samples)] for (row,) in packed]
    assert sorted(documents) == [[16] * 12, [120]]


def test_the_row_of_least_cost_may_have_no_room():
    """100 tokens cost 5100, ten cost 60: the others fill the second row, then go to the dear one."""
    samples = by_lengths(100, *[10] * 20)
    packed = pack(samples, 150, 1, attention_tokens=1)
    check_rows(packed, 150, 1)
    assert [len(row.tokens) for row in packed[0]] == [150, 150]


def test_rows_of_similar_cost_share_a_turn():
    """Full rows of one long document cost almost twice what those of short ones do: they go in turns of their own."""
    samples = by_lengths(*[128] * 2, *[8] * 32)
    costs = row_costs(pack(samples, 128, 2, attention_tokens=64), 64)
    assert costs == [[256.0, 256.0], [136.0, 136.0]]


def packing_metrics(minibatches: list[list[list[PackedRow]]], attention_tokens: float = math.inf) -> dict[str, float]:
    return packing_fractions(packing_sums(minibatches, attention_tokens))


def test_packing_metrics():
    one = pack(by_lengths(6, 3), 8, 2, 8)  # rows of 6 + 2 and 3 + 5
    assert packing_metrics([one]) == {
        "pack/padding_fraction": 7 / 16,
        "pack/shared_fraction": 0.0,
        "pack/imbalance": 1.0,
    }
    # costs with 2: (6 + 9) + (2 + 1) = 18 and (3 + 9 / 4) + (5 + 25 / 4) = 16.5
    assert packing_metrics([one], 2)["pack/imbalance"] == pytest.approx(18 / 17.25)
    two = pack(by_lengths(8, 8, 4), 8, 2)  # a turn of 8 and 8 and one of 4 and a token of padding
    metrics = packing_metrics([one, two])
    assert metrics["pack/padding_fraction"] == pytest.approx(8 / 37)
    assert metrics["pack/imbalance"] == pytest.approx((8 + 8 + 4) / (8 + 8 + 2.5))


def group(prompt_tokens: int, answers: list[int], seed: int) -> list[PackedSample]:
    """Samples with one prompt. Half of them have a copy of it."""
    own = [sample(prompt_tokens, n, seed + 100 * i) for i, n in enumerate(answers)]
    for i, each in enumerate(own):
        each.prompt_ids = own[0].prompt_ids if i % 2 else list(own[0].prompt_ids)
    return own


def test_exact_row_of_a_group():
    answers = [[3, 4], [5], [6, 7, 8]]
    samples = [PackedSample([1, 9, 2], ids, 1.0, 1.0, [0.0] * len(ids)) for ids in answers]
    ((row,),) = pack(samples, 20, 1, 10)
    microbatch, row = Microbatch.of(row, "cpu"), Spread(row)
    assert row.tokens.tolist() == [1, 9, 2, 3, 2, 2, 6, 7, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 2, 2, 3, 4, 0, 1]
    assert row.targets.tolist() == [0, 0, 3, 4, 5, 6, 7, 8, 0, 0]
    assert row.sample_index.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, -1, -1]
    assert row.cu_seqlens.tolist() == [0, 4, 5, 8, 10]
    assert (row.lengths.tolist(), row.shared.tolist()) == ([4, 1, 3], [0, 2, 2])
    assert microbatch.max_seqlen == 4 and microbatch.samples.tolist() == [0, 1, 2]
    positions, cu_keys, order, bounds, longest = microbatch.keys
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 5, 6, 7, 8, 9]
    assert cu_keys.tolist() == [0, 4, 7, 12, 14] and longest == 5
    assert order.tolist() == [0, 4, 7, 1, 5, 8, 2, 3, 6, 9, 10, 11, 12, 13]
    assert bounds.tolist() == [0, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    (apart,) = pack(samples, 16, 1, 1, share_prompts=False)[0]
    assert not apart.shared.any() and Microbatch.of(apart, "cpu").keys is None and len(apart.tokens) == 4 + 3 + 5


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("pad_multiple", [1, 256])
@pytest.mark.parametrize("attention_tokens", [64.0, math.inf])
def test_groups_have_their_prompt_once_in_a_row(num_ranks, pad_multiple, attention_tokens):
    rng = random.Random(7)
    samples = [
        s for i in range(9) for s in group(rng.choice([1, 2, 30, 90]), [rng.randint(1, 60) for _ in range(6)], i)
    ]
    rng.shuffle(samples)
    packed = pack(samples, 256, num_ranks, pad_multiple, attention_tokens)
    check_rows(packed, 256, pad_multiple)
    found = unpack(packed)
    assert sorted(found) == list(range(len(samples)))
    for i, expected in enumerate(samples):
        assert found[i].prompt_ids == expected.prompt_ids and found[i].answer_ids == expected.answer_ids
        assert found[i].sampler_logprobs == pytest.approx(expected.sampler_logprobs)
    apart = pack(samples, 256, num_ranks, pad_multiple, attention_tokens, share_prompts=False)
    check_rows(apart, 256, pad_multiple)
    assert len(packed[0]) < len(apart[0])
    (metrics, without) = (packing_metrics([rows], attention_tokens) for rows in (packed, apart))
    assert without["pack/shared_fraction"] == 0
    tokens = sum(len(s.prompt_ids) + len(s.answer_ids) - 1 for s in samples)
    once = tokens - sum({tuple(s.prompt_ids): 5 * (len(s.prompt_ids) - 1) for s in samples}.values())
    assert 0.5 * (1 - once / tokens) < metrics["pack/shared_fraction"] <= 1 - once / tokens


def test_a_group_beyond_the_budget_has_its_prompt_in_each_row():
    samples = group(20, [10] * 9, 0)  # 19 in common and 10 each: four in a row of 60
    packed = pack(samples, 60, 1)
    check_rows(packed, 60, 1)
    assert [row.lengths.tolist() for row in packed[0]] == [[29, 10, 10]] * 3
    assert sorted(unpack(packed)) == list(range(9))


def test_small_parts_of_groups_even_out_ranks():
    """A rank each for two groups of unlike size would leave one waiting."""
    samples = group(8, [8] * 24, 0) + group(8, [8] * 8, 1)
    packed = pack(samples, 512, 2)
    check_rows(packed, 512, 1)
    assert packing_metrics([packed])["pack/imbalance"] < 1.05


@pytest.mark.parametrize("seed", range(40))
def test_sharing_never_takes_more_rows_or_costlier_turns(seed):
    rng = random.Random(seed)
    prompts, answers = rng.choice([(1, 4), (20, 100), (200, 500)]), rng.choice([(5, 40), (50, 500)])
    number = rng.choice([2, 4, 16])
    samples = [
        s
        for i in range(rng.choice([2, 8]))
        for s in group(rng.randint(*prompts), [rng.randint(*answers) for _ in range(number)], i)
    ]
    ranks, pad, attention_tokens = rng.choice([1, 2, 16]), rng.choice([1, 2048]), rng.choice([500.0, math.inf])
    found = []
    for share in (True, False):
        packed = pack(samples, 2048, ranks, pad, attention_tokens, share)
        check_rows(packed, 2048, pad)
        turns = zip(*packed, strict=True)
        found.append((len(packed[0]), sum(max_cost(turn, attention_tokens) for turn in turns)))
    assert found[0] <= (found[1][0], found[1][1] * (1 + 1e-9)) or found[0][0] < found[1][0]


def max_cost(turn: tuple[PackedRow, ...], attention_tokens: float) -> float:
    costs = []
    for row in turn:
        pairs = [n * (n + 2 * p) for n, p in zip(row.lengths.tolist(), row.shared.tolist(), strict=True)]
        costs.append(len(row.tokens) + sum(pairs) / (2 * attention_tokens))
    return max(costs)


def test_a_row_is_filled_on_where_a_prompt_may_have_no_more_copies():
    samples = [s for i in range(8) for s in group(200, [1] * 16, i)]
    lengths = {i: s.document_tokens for i, s in enumerate(samples)}
    rows = _fill_rows(groups_by_prompt(samples, lengths), lengths, 2048)
    assert len(rows) == 2 and sum(len(part.samples) for row in rows for part in row) == len(samples)


def test_documents_have_at_most_eight_times_the_tokens_of_their_row():
    samples = group(100, [1] * 40, 0)  # 100 and 39 more would be 4,000 of documents
    ((row,),) = pack(samples, 1024, 1)
    assert sorted(unpack([[row]])) == list(range(40))
    assert len(Microbatch.of(row, "cpu").keys.positions) == 4000 <= MOST_COPIES * len(row.tokens)
    assert row.shared.tolist().count(0) == 5


def test_prompts_with_other_routes_are_not_shared():
    samples = group(4, [2, 2, 2], 0)
    for s, expert in zip(samples, (1, 1, 2), strict=True):
        s.routes = np.full((5, 1, 1), expert, np.uint8)
        s.routes[3:] = 7 + expert  # of the last token of the prompt and the first of the answer: each has its own
    ((row,),) = pack(samples, 64, 1)
    assert row.shared.tolist() == [0, 3, 0]
    assert row.routes.flatten().tolist() == [1, 1, 1, 8, 8, 8, 8, 2, 2, 2, 9, 9]
    samples[1].routes = None
    ((row,),) = pack(samples, 64, 1)
    assert row.shared.tolist() == [0, 0, 0]


def test_costs_of_documents_without_their_prompt():
    """3 + 4 tokens, of which the second document has 4 and attends to 7: 6 + 36 / 4 and 4 + (49 - 9) / 4."""
    ((row,),) = pack(group(4, [3, 4], 0), 64, 1, attention_tokens=2)
    assert row.lengths.tolist() == [6, 4]
    filler = pack(by_lengths(1), 64, 1)
    assert packing_metrics([[[row]]], 2)["pack/imbalance"] == 1.0
    two_ranks = [[row], filler[0]]
    expected = 6 + 36 / 4 + 4 + 40 / 4
    assert packing_metrics([two_ranks], 2)["pack/imbalance"] == pytest.approx(expected / ((expected + 1.25) / 2))


def test_padding_has_few_documents_even_in_an_empty_row():
    """FlashAttention's backward takes memory by the document: 16k of one token each took more than the model."""
    for packed in (pack([], 16384, 1, 16384), pack(by_lengths(1, 1), 16384, 1, 16384)):
        ((row,),) = packed
        check_rows(packed, 16384, 16384)
        assert len(row.cu_seqlens) <= 2 + 64 + 1
        assert Microbatch.of(row, "cpu").max_seqlen == PADDING_DOCUMENT_TOKENS and int(row.positions.max()) == 1


def test_documents_of_one_token():
    ((row,),) = pack(by_lengths(1, 1, 1), 8, 1)
    microbatch = Microbatch.of(row, "cpu")
    assert microbatch.cu_seqlens.tolist() == [0, 1, 2, 3] and microbatch.max_seqlen == 1
    assert microbatch.answer_positions.tolist() == [0, 1, 2]
    assert microbatch.sample_ids.tolist() == [0, 1, 2]


def test_packing_is_deterministic():
    samples = random_samples(60, longest=60, seed=5)
    once, again = pack(samples, 128, 2, 16), pack(samples, 128, 2, 16)
    assert_equal([*itertools.chain(*once)], [*itertools.chain(*again)])


@pytest.mark.parametrize("samples", [[], random_samples(9, longest=30, seed=1)], ids=["empty", "filled"])
@pytest.mark.parametrize("pad_multiple", [1, 32])
def test_rows_cross_as_few_bytes(samples, pad_multiple):
    for rows in pack(samples, 128, 2, pad_multiple):
        data = to_bytes(rows)
        assert_equal(rows, from_bytes(data))
        assert len(data) < sum(
            5 * len(row.tokens) + 12 * len(row.targets) + 24 * len(row.samples) + 900 for row in rows
        )


@pytest.mark.parametrize("samples", [[], random_samples(9, longest=30, seed=1)], ids=["empty", "filled"])
@pytest.mark.parametrize("pad_multiple", [1, 32])
def test_a_row_moves_as_one_aligned_block(samples, pad_multiple):
    """The copy to a device, here to this one: what is read back is what was laid, and one allocation holds it all."""
    for row in itertools.chain(*pack(samples, 128, 2, pad_multiple)):
        microbatch = Microbatch.of(row, "cpu")
        names = [f.name for f in fields(Microbatch) if isinstance(getattr(microbatch, f.name), torch.Tensor)]
        tensors = [getattr(microbatch, name) for name in names]
        moved = _move(tensors, torch.device("cpu"))
        assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1
        for name, before, after in zip(names, tensors, moved, strict=True):
            assert before.dtype == after.dtype and torch.equal(before, after), name
            assert after.storage_offset() * after.element_size() % 16 == 0


def test_a_row_on_another_device_keeps_shapes_and_the_longest_document():
    routed = dataclasses.replace(sample(5, 4), routes=np.zeros((8, 3, 2), np.int16), top=TopTokens.none(4, 3))
    ((row,),) = pack([sample(3, 2), routed], 32, 1, 16)
    here, there = Microbatch.of(row, "cpu"), Microbatch.of(row, "meta")
    assert there.max_seqlen == here.max_seqlen == 8
    for f in fields(Microbatch):
        if isinstance(getattr(here, f.name), torch.Tensor):
            value, expected = getattr(there, f.name), getattr(here, f.name)
            assert value.device.type == "meta" and (value.shape, value.dtype) == (expected.shape, expected.dtype), (
                f.name
            )


def test_a_teachers_tokens_lie_where_the_answers_tokens_are_predicted():
    """There are none where nothing is trained, on padding, and of a sample whose teacher failed."""
    draw = np.random.default_rng(0)

    def taught(prompt: int, mask: list[bool]) -> PackedSample:
        tokens = len(mask)
        top = TopTokens(
            draw.integers(0, 99, (tokens, 3)).astype(np.int32), draw.normal(size=(tokens, 3)).astype(np.float32)
        )
        return dataclasses.replace(sample(prompt, tokens), loss_mask=mask, top=top)

    samples = [taught(3, [True] * 4), taught(2, [False, True, True, False]), sample(4, 2), taught(1, [True])]
    seen = []
    for row in itertools.chain(*pack(samples, 16, 2, 8)):
        assert (row.top_ids.dtype, row.top_logprobs.dtype) == (np.int32, np.float32)
        assert_equal([row], from_bytes(to_bytes([row])))
        microbatch, row, trained = Microbatch.of(row, "cpu"), Spread(row), row.trained
        assert (row.top_ids[~trained] == -1).all() and (row.top_logprobs[~trained] == -np.inf).all()
        assert np.array_equal(microbatch.top_ids, row.top_ids[trained])
        assert np.array_equal(microbatch.top_logprobs, row.top_logprobs[trained])
        for number in row.samples.tolist():
            at = (row.sample_index == number) & trained
            s = samples[number]
            own = s.top or TopTokens.none(len(s.answer_ids), 3)
            kept = [True] * len(s.answer_ids) if s.loss_mask is None else s.loss_mask
            assert np.array_equal(row.top_ids[at], own.ids[kept])
            assert np.array_equal(row.top_logprobs[at], own.logprobs[kept])
            seen.append(number)
    assert sorted(seen) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="sample 0 has 2 positions with likeliest tokens for 3 answer tokens"):
        pack([dataclasses.replace(sample(2, 3), top=TopTokens.none(2, 3))], 16, 1)


def test_kept_tokens_lie_where_the_answers_tokens_are_predicted():
    """All are kept of a sample that says nothing."""

    def cut(prompt: int, mask: list[bool], first: int) -> PackedSample:
        counts = np.array([1 + i if sampled else 0 for i, sampled in enumerate(mask)], np.int32)
        kept = KeptTokens(counts, np.arange(first, first + counts.sum(), dtype=np.int32))
        return dataclasses.replace(sample(prompt, len(mask)), loss_mask=mask, kept=kept)

    samples = [cut(3, [True] * 4, 0), cut(2, [False, True, True, False], 100), sample(4, 2), cut(1, [True], 200)]
    expected = {0: [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]], 1: [[100, 101], [102, 103, 104]], 2: [[], []], 3: [[200]]}
    rows = list(itertools.chain(*pack(samples, 16, 2, 8)))
    seen = []
    for row in rows:
        assert_equal([row], from_bytes(to_bytes([row])))
        if row.kept_counts is None:
            assert row.samples.tolist() in ([], [2])
            continue
        kept = Microbatch.of(row, "cpu").kept
        found = [kept.ids[a:b].tolist() for a, b in itertools.pairwise(kept.ends.tolist())]
        assert found == [ids for number in row.samples.tolist() for ids in expected[number]]
        assert kept.counts.tolist() == list(map(len, found))
        assert kept.part(slice(1, 3)).ids.tolist() == [token for ids in found[1:3] for token in ids]
        seen += row.samples.tolist()
    assert {0, 1, 3} <= set(seen)
    with pytest.raises(ValueError, match="sample 0 has 2 positions with kept tokens for 3 answer tokens"):
        pack([dataclasses.replace(sample(2, 3), kept=KeptTokens.all(2))], 16, 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routes_lie_at_the_positions_that_they_computed(dtype):
    """Those of tokens behind the last trained one are cut off. Padding is free, and so is a sample without routes."""
    draw = np.random.default_rng(0)

    def routed(prompt: int, answer: int, trained: int | None = None) -> PackedSample:
        mask = None if trained is None else [True] * trained + [False] * (answer - trained)
        routes = draw.integers(0, 9, (prompt + answer - 1, 3, 2)).astype(dtype)
        return dataclasses.replace(sample(prompt, answer), loss_mask=mask, routes=routes)

    samples = [routed(3, 4), routed(2, 6, trained=2), sample(4, 2), routed(1, 1)]
    everything = []
    for row in itertools.chain(*pack(samples, 16, 2, 8)):
        assert row.routes is not None and row.routes.shape == (len(row.tokens), 3, 2)
        assert_equal([row], from_bytes(to_bytes([row])))
        assert np.array_equal(Microbatch.of(row, "cpu").routes, row.routes)
        ends = row.cu_seqlens.tolist()
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            number = int(Spread(row).sample_index[start])
            expected = None if number < 0 else samples[number].routes
            found = row.routes[start:end]
            everything.append(number)
            if expected is None:
                assert (found == np.iinfo(dtype).max).all(), i
            else:
                assert np.array_equal(found, expected[: end - start]), i
    assert {0, 1, 2, 3, -1} <= set(everything)
    with pytest.raises(ValueError, match="sample 0 has routes of 5 positions, not 6"):
        pack([dataclasses.replace(samples[0], routes=samples[0].routes[:5])], 16, 1)


def test_arrays_are_packed_as_lists_are():
    draw = np.random.default_rng(0)
    lists = []
    for _ in range(40):
        prompt, answer = draw.integers(1, 30, 2)
        mask = [True, *(draw.random(answer - 1) < 0.5).tolist()]
        zeros = [0.0] * int(answer)
        lists.append(
            PackedSample(*(draw.integers(0, 99, n).tolist() for n in (prompt, answer)), 1.0, 0.5, zeros, [], mask)
        )
    arrays = [
        dataclasses.replace(
            sample,
            prompt_ids=np.array(sample.prompt_ids, np.int32),
            answer_ids=np.array(sample.answer_ids, np.int32),
            loss_mask=np.array(sample.loss_mask),
            sampler_logprobs=None,
        )
        for sample in lists
    ]
    for of_lists, of_arrays in zip(pack(lists, 96, 2, 4), pack(arrays, 96, 2, 4), strict=True):
        assert_equal(of_lists, of_arrays)
