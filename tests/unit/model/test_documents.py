"""Which positions of a packed row are computed: each distinct prefix of its documents once."""

import random

import pytest
import torch
from torch.utils._pytree import tree_map

from torchtitan.grpo.model import documents as module
from torchtitan.grpo.model.documents import Documents, shared_prefixes
from torchtitan.grpo.policy.microbatch import DocumentKeys
from torchtitan.models.attention import VarlenMetadata


def shared(documents: list[list[int]]) -> tuple[Documents, torch.Tensor, torch.Tensor] | None:
    lengths = torch.tensor([len(document) for document in documents])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    longest = int(lengths.max())
    tokens = torch.tensor([t for document in documents for t in document])
    return shared_prefixes(tokens, Documents(bounds, bounds, longest, longest))


def prefixes(documents: list[list[int]]) -> list[tuple[int, ...]]:
    """Of each position of the row, the tokens that its state depends on."""
    return [tuple(document[: i + 1]) for document in documents for i in range(len(document))]


def check(documents: list[list[int]], computed: set[tuple[int, ...]]) -> None:
    """Every position reads the state of its own prefix, and attention reads and gives each state in its place."""
    (result, positions, index), of_row = shared(documents), prefixes(documents)
    kept = [of_row[i] for i in positions.tolist()]
    assert sorted(kept) == sorted(computed)
    assert [kept[i] for i in index.tolist()] == of_row
    padded, first = result.padded, 0
    taken = padded.taken.tolist()
    assert padded.slots[padded.taken].tolist() == list(range(len(kept)))
    for number, length in padded.shapes:
        for start in range(first, first + number * length, length):
            for slot in set(taken) & set(range(start, start + length)):  # the slots before it hold its prefix
                own = [kept[i][-1] for i in padded.slots[start : slot + 1].tolist()]
                assert tuple(own) == kept[taken.index(slot)]
        first += number * length
    assert first == len(padded.slots)


@pytest.mark.parametrize(
    "documents",
    [
        [[1, 2, 3], [1, 2, 4], [1, 2, 3, 9]],  # a group: one prompt, answers of which one is another's beginning
        [[5, 6], [5, 6], [5, 6]],  # equal documents
        [[7], [7, 7], [7, 7, 7], [8]],
        [[0, 0], [0], [0, 0, 0]],  # token 0, which pads rows
        [[3, 1], [1, 3], [1, 3]],
    ],
)
def test_each_distinct_prefix_is_computed_once(documents):
    check(documents, set(prefixes(documents)))


def row_of(groups: list[tuple[list[int], list[list[int]]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and bounds of a row that holds each group's prompt once, in front of its first document."""
    tokens, positions, bounds = [], [], [0]
    for prompt, tails in groups:
        for i, tail in enumerate(tails):
            tokens += tail if i else prompt + tail
            positions += range(len(prompt) if i else 0, len(prompt) + len(tail))
            bounds.append(len(tokens))
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(bounds, dtype=torch.int32)


GROUPS = [
    ([1, 2, 3], [[4, 5], [4], [6, 7, 8]]),
    ([9], [[1]]),  # a group of one
    ([], [[5, 5], [5]]),  # nothing in common
    ([1, 2], [[3, 3], [3, 4]]),
]


def given(groups: list[tuple[list[int], list[list[int]]]]) -> tuple[torch.Tensor, Documents, list[list[int]]]:
    tokens, positions, bounds = row_of(groups)
    keys = DocumentKeys.of(positions, bounds)
    documents = Documents(bounds, keys.cu_keys, 9, keys.longest, keys)
    return tokens, documents, [prompt + tail for prompt, tails in groups for tail in tails]


def test_documents_are_read_with_the_prompt_of_an_earlier_one():
    tokens, documents, whole = given(GROUPS)
    assert tokens[documents.keys.positions].tolist() == [token for document in whole for token in document]
    assert documents.cu_seq_k.diff().tolist() == [len(document) for document in whole] and documents.max_k == 6
    padded = documents.padded
    assert padded.slots[padded.taken].tolist() == list(range(len(tokens)))
    batches, first = [], 0
    for number, length in padded.shapes:
        batches += tokens[padded.slots[first : first + number * length]].view(number, length).tolist()
        first += number * length
    for document in whole:
        assert any(batch[: len(document)] == document for batch in batches)
    assert documents.with_padded().padded.slots.tolist() == padded.slots.tolist()


def test_prefixes_are_shared_beyond_the_prompts_that_a_row_holds_once():
    tokens, documents, whole = given(GROUPS)
    # Of each position of the row, its prefix.
    place = dict(zip(documents.keys.positions.tolist(), prefixes(whole), strict=True))
    result, kept, index = shared_prefixes(tokens, documents)
    computed = [place[i] for i in kept.tolist()]
    assert sorted(computed) == sorted(set(prefixes(whole)))
    assert [computed[i] for i in index.tolist()] == [place[i] for i in range(len(tokens))]
    assert result.padded.slots[result.padded.taken].tolist() == list(range(len(kept)))


def test_a_row_whose_documents_are_whole_needs_no_keys():
    assert DocumentKeys.of(torch.tensor([0, 1, 2, 0, 1, 1]), torch.tensor([0, 3, 6], dtype=torch.int32)) is None


def test_random_groups():
    draw = random.Random(0)
    for _ in range(30):
        prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 5))] for _ in range(4)]
        documents = [p + [draw.randrange(3) for _ in range(draw.randint(0, 9))] for p in prompts for _ in range(5)]
        check(documents, set(prefixes(documents)))


@pytest.mark.parametrize("documents", [[[1, 2, 3]], [[1, 2], [2, 1], [3]], [[4]]])
def test_a_row_with_nothing_in_common_is_computed_as_it_is(documents):
    assert shared(documents) is None


def test_attention_sees_them_also_where_a_tuple_is_built_anew():
    """As FSDP2 does with the arguments of a block."""
    result, *_ = shared([[1, 2, 3], [1, 2, 4]])
    again = tree_map(lambda leaf: leaf, result)
    assert isinstance(again, VarlenMetadata) and again.max_q == 3
    assert again.padded.slots.tolist() == result.padded.slots.tolist() == [0, 1, 2, 0, 1, 3]


def test_only_as_much_is_compared_as_the_table_holds(monkeypatch):
    monkeypatch.setattr(module, "SHARED_TOKENS_MAX", 6)  # 2 columns for 3 documents
    documents = [[1, 2, 3, 4], [1, 2, 3], [1, 2]]
    result, kept, index = shared(documents)
    assert kept.tolist() == [0, 1, 2, 3, 6]
    assert index.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1]
    assert result.padded.slots[result.padded.taken].tolist() == [0, 1, 2, 3, 4]
