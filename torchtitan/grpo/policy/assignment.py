"""Which samples a row gets: parts of groups with one prompt, under a token budget, at similar cost on every rank."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.policy.rows import PackedSample

PARTS_OF_A_ROW = (1, 2, 8)
"""Groups are cut into parts of at most a row, or of at most these shares of it. A large part repeats its prompt less
often; small ones fill rows better. The result of least cost is taken."""

MOST_COPIES = 8
"""A row's documents have at most so many times its tokens. On a GPU attention copies keys and values of whole
documents, one layer at a time. More of them would cost more memory than they save time."""


@dataclass(frozen=True)
class Group:
    """Samples that a row may hold with one prompt between them, and how many positions of it they have in common."""

    samples: list[int]
    shared: int


def groups_by_prompt(samples: Sequence[PackedSample], indices: Iterable[int]) -> list[Group]:
    """The samples by prompt, in order. Where a router replays its routes, those of the prompt must be equal too."""
    prompts: dict[int, bytes] = {}  # by object: the answers of a group mostly have the same one
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for i in indices:
        ids, routes = samples[i].prompt_ids, samples[i].routes
        if id(ids) not in prompts:
            prompts[id(ids)] = np.asarray(ids, np.int64).tobytes()
        replayed = b"" if routes is None else routes[: len(ids) - 1].tobytes()
        groups.setdefault((prompts[id(ids)], replayed), []).append(i)
    # The last token of a prompt predicts each answer's first, and every document has it.
    return [Group(members, len(samples[members[0]].prompt_ids) - 1) for members in groups.values()]


def assign(
    groups: Sequence[Group],
    lengths: Mapping[int, int],
    budget_tokens: int,
    num_ranks: int,
    pad_multiple: int,
    attention_tokens: float,
) -> list[list[list[int]]]:
    """Samples of each part of each row, rows in falling order of cost; a multiple of `num_ranks` rows, at least that
    many.

    Args:
        lengths: Positions of each sample's whole document, at most `budget_tokens`.
        budget_tokens, num_ranks, pad_multiple, attention_tokens: See `packing.pack`.
    """
    found, seen = [], []
    for share in PARTS_OF_A_ROW:
        parts = [part for group in groups for part in _parts(group, lengths, budget_tokens // share)]
        if parts in seen:
            continue
        seen.append(parts)
        tokens, attention = {}, {}
        for p, part in enumerate(parts):
            repeats, own = len(part.samples) - 1, [lengths[i] for i in part.samples]
            tokens[p] = sum(own) - repeats * part.shared
            attention[p] = (sum(n**2 for n in own) - repeats * part.shared**2) / (2 * attention_tokens)
        rows, cost = _balance(tokens, attention, budget_tokens, num_ranks, pad_multiple)
        found.append((len(rows), cost, [[parts[p].samples for p in row] for row in rows]))
    return min(found, key=lambda each: each[:2])[2]


def _parts(group: Group, lengths: Mapping[int, int], most_tokens: int) -> list[Group]:
    """The group in parts of at most `most_tokens`, of similar size. A longer document is a part of its own."""
    if len(group.samples) == 1:
        return [group]
    order = sorted(group.samples, key=lambda i: (-lengths[i], i))
    whole = sum(lengths[i] for i in order)
    if whole > MOST_COPIES * (whole - (len(order) - 1) * group.shared):
        number = -(-len(order) // MOST_COPIES)
        smaller = [Group(order[i::number], group.shared) for i in range(number)]
        return [part for each in smaller for part in _parts(each, lengths, most_tokens)]
    room = max(most_tokens, lengths[order[0]]) - group.shared
    tails = {i: lengths[i] - group.shared for i in order}
    cut = _least_loaded(order, tails, tails, room, -(-sum(tails.values()) // room)) or _first_fit(order, tails, room)
    return [Group(sorted(part), group.shared) for part in cut]


def _balance(
    lengths: Mapping[int, int],
    attention: Mapping[int, float],
    budget_tokens: int,
    num_ranks: int,
    pad_multiple: int,
) -> tuple[list[list[int]], float]:
    """Items into rows: the rows, and the cost of all turns (see `packing.pack`)."""
    costs = {i: tokens + attention[i] for i, tokens in lengths.items()}
    all_loads: list[Mapping[int, float]] = [costs, attention, lengths] if any(attention.values()) else [lengths]

    def cost(row: list[int]) -> float:
        tokens = sum(lengths[i] for i in row)
        return max(1, -(-tokens // pad_multiple)) * pad_multiple + sum(attention[i] for i in row)

    def duration(rows: list[list[int]]) -> float:
        return sum(sorted(map(cost, rows), reverse=True)[::num_ranks])

    longest_first = sorted(lengths, key=lambda i: (-lengths[i], i))
    tight = _first_fit(longest_first, lengths, budget_tokens)
    least_turns = max(1, -(-sum(lengths.values()) // (budget_tokens * num_ranks)))
    most_turns = max(1, -(-len(tight) // num_ranks))
    for turns in range(least_turns, most_turns + 1):
        tried = (_least_loaded(longest_first, lengths, loads, budget_tokens, turns * num_ranks) for loads in all_loads)
        balanced = [rows for rows in tried if rows]
        if balanced:
            rows = min(balanced, key=duration)
            break
    else:  # balancing wastes room that first fit does not
        rows = tight + [[] for _ in range(most_turns * num_ranks - len(tight))]
    ordered = sorted(map(sorted, rows), key=lambda row: (-cost(row), -sum(lengths[i] for i in row)))
    return ordered, duration(rows)


def _least_loaded(
    order: list[int], lengths: Mapping[int, int], loads: Mapping[int, float], budget_tokens: int, num_rows: int
) -> list[list[int]]:
    """Each sample into the row with the least load of those that have room for it; [] if none has."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [budget_tokens] * num_rows
    heap: list[tuple[float, int]] = [(0, row) for row in range(num_rows)]  # (load, row)
    for i in order:
        full = []
        while heap and room[heap[0][1]] < lengths[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return []
        load, row = heap[0]
        heapq.heapreplace(heap, (load + loads[i], row))
        rows[row].append(i)
        room[row] -= lengths[i]
        for entry in full:
            heapq.heappush(heap, entry)
    return rows


def _first_fit(order: list[int], lengths: Mapping[int, int], budget_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget_tokens)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows
