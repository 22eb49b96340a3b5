"""Which samples a row gets: parts of groups with one prompt, under a token budget, at similar cost on every rank."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.policy.rows import PackedSample

PARTS_OF_A_ROW = (1, 4)
"""Groups are cut into parts of at most a row, or of at most these shares of it. Single documents are tried too, and
rows that are filled one after another. A large part repeats its prompt less often; small ones fill rows better."""

MOST_COPIES = 8
"""A row's documents have at most so many times its tokens. On a GPU attention copies keys and values of whole
documents, one layer at a time. More of them would cost more memory than they save time."""


@dataclass(frozen=True)
class Part:
    """Samples that a row may hold with one prompt between them, and how many positions of it they have in common."""

    samples: list[int]
    shared: int


def groups_by_prompt(samples: Sequence[PackedSample], indices: Iterable[int]) -> list[Part]:
    """The samples by prompt, in order. Where a router replays its routes, those of the prompt must be equal too."""
    prompts: dict[int, bytes] = {}  # by object: the answers of a group mostly have the same one
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for i in indices:
        ids, routes = samples[i].prompt_ids, samples[i].routes
        if len(ids) == 1:  # nothing to share
            groups[b"", str(i).encode()] = [i]
            continue
        if id(ids) not in prompts:
            prompts[id(ids)] = np.asarray(ids, np.int64).tobytes()
        replayed = b"" if routes is None else routes[: len(ids) - 1].tobytes()
        groups.setdefault((prompts[id(ids)], replayed), []).append(i)
    # The last token of a prompt predicts each answer's first, and every document has it.
    return [Part(members, len(samples[members[0]].prompt_ids) - 1) for members in groups.values()]


def assign(
    groups: Sequence[Part],
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

    def consider(rows: list[list[Part]]) -> None:
        costs = [_cost(row, lengths, pad_multiple, attention_tokens) for row in rows]
        order = sorted(range(len(rows)), key=lambda r: (-costs[r], -sum(_tokens(part, lengths) for part in rows[r])))
        turns = sum(costs[r] for r in order[::num_ranks])
        found.append((len(rows), turns, [[part.samples for part in rows[r]] for r in order]))

    for most_tokens in (*(budget_tokens // share for share in PARTS_OF_A_ROW), 0):
        parts = [part for group in groups for part in _parts(group, lengths, most_tokens)]
        if parts in seen:
            continue
        seen.append(parts)
        tokens = {p: _tokens(part, lengths) for p, part in enumerate(parts)}
        attention = {p: _squares(part, lengths) / (2 * attention_tokens) for p, part in enumerate(parts)}
        for rows in _balance(tokens, attention, budget_tokens, num_ranks):
            consider([[parts[p] for p in sorted(row)] for row in rows])
    if any(len(group.samples) > 1 for group in groups):
        consider(_fill(seen[0], lengths, budget_tokens, num_ranks))
    return min(found, key=lambda each: each[:2])[2]


def _tokens(part: Part, lengths: Mapping[int, int]) -> int:
    """Positions that a row needs for it."""
    return sum(lengths[i] for i in part.samples) - (len(part.samples) - 1) * part.shared


def _squares(part: Part, lengths: Mapping[int, int]) -> int:
    """Twice the pairs of positions of its attention."""
    return sum(lengths[i] ** 2 for i in part.samples) - (len(part.samples) - 1) * part.shared**2


def _cost(row: Sequence[Part], lengths: Mapping[int, int], pad_multiple: int, attention_tokens: float) -> float:
    """See `packing.pack`."""
    tokens = sum(_tokens(part, lengths) for part in row)
    padded = max(1, -(-tokens // pad_multiple)) * pad_multiple
    return padded + sum(_squares(part, lengths) for part in row) / (2 * attention_tokens)


def _parts(group: Part, lengths: Mapping[int, int], most_tokens: int) -> list[Part]:
    """The group in parts of at most `most_tokens`, of similar size. A longer document is a part of its own; with 0 each
    document is."""
    if len(group.samples) == 1:
        return [group]
    order = sorted(group.samples, key=lambda i: (-lengths[i], i))
    whole = sum(lengths[i] for i in order)
    if whole > MOST_COPIES * (whole - (len(order) - 1) * group.shared):
        number = -(-len(order) // MOST_COPIES)
        smaller = [Part(order[i::number], group.shared) for i in range(number)]
        return [part for each in smaller for part in _parts(each, lengths, most_tokens)]
    if not most_tokens:
        return [Part([i], group.shared) for i in order]
    room = max(most_tokens, lengths[order[0]]) - group.shared
    tails = {i: lengths[i] - group.shared for i in order}
    cut = _least_loaded(order, tails, tails, room, -(-sum(tails.values()) // room)) or _first_fit(order, tails, room)
    return [Part(sorted(part), group.shared) for part in cut]


def _balance(
    lengths: Mapping[int, int], attention: Mapping[int, float], budget_tokens: int, num_ranks: int
) -> list[list[list[int]]]:
    """Items into as few rows as can be: by each of several loads, or by first fit, which wastes less room."""
    costs = {i: tokens + attention[i] for i, tokens in lengths.items()}
    all_loads: list[Mapping[int, float]] = [costs, attention, lengths] if any(attention.values()) else [lengths]
    longest_first = sorted(lengths, key=lambda i: (-lengths[i], i))
    tight = _first_fit(longest_first, lengths, budget_tokens)
    least_turns = max(1, -(-sum(lengths.values()) // (budget_tokens * num_ranks)))
    most_turns = max(1, -(-len(tight) // num_ranks))
    for turns in range(least_turns, most_turns + 1):
        tried = (_least_loaded(longest_first, lengths, loads, budget_tokens, turns * num_ranks) for loads in all_loads)
        balanced = [rows for rows in tried if rows]
        if balanced:
            return balanced
    return [tight + [[] for _ in range(most_turns * num_ranks - len(tight))]]


def _fill(groups: Sequence[Part], lengths: Mapping[int, int], budget_tokens: int, num_ranks: int) -> list[list[Part]]:
    """One row after another, filled with as much of a group as there is room for. So few prompts are repeated, and all
    rows but the last are full, or as full as makes them even."""
    rows = _fill_rows(groups, lengths, budget_tokens)
    number = -(-len(rows) // num_ranks) * num_ranks
    even = -(-sum(_tokens(part, lengths) for row in rows for part in row) // number)
    least = max(lengths[i] for group in groups for i in group.samples)
    for slack in (1.0, 1.02, 1.05, 1.1, 1.2):
        tried = _fill_rows(groups, lengths, min(budget_tokens, max(least, int(even * slack))))
        if len(tried) <= number:
            rows = tried
            break
    return rows + [[] for _ in range(number - len(rows))]


def _fill_rows(groups: Sequence[Part], lengths: Mapping[int, int], room: int) -> list[list[Part]]:
    rows: list[list[Part]] = [[]]
    left = room
    for group in groups:
        rest = sorted(group.samples, key=lambda i: (-lengths[i], i))
        while rest:
            taken: dict[int, None] = {}
            used = whole = 0
            for i in rest:
                more = lengths[i] - (group.shared if taken else 0)
                few = len(taken) < MOST_COPIES or whole + lengths[i] <= MOST_COPIES * (used + more)
                if few and used + more <= left:
                    taken[i] = None
                    used, whole = used + more, whole + lengths[i]
            if taken:  # not all that there is room for, if that would be too many copies of the prompt
                rows[-1].append(Part(sorted(taken), group.shared))
                left -= used
                rest = [i for i in rest if i not in taken]
            else:
                rows.append([])
                left = room
    return rows


def _least_loaded(
    order: list[int], lengths: Mapping[int, int], loads: Mapping[int, float], budget_tokens: int, num_rows: int
) -> list[list[int]]:
    """Each sample, longest first, into the row with the least load of those that have room for it; [] if none has."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [budget_tokens] * num_rows
    heap: list[tuple[float, int]] = [(0, row) for row in range(num_rows)]  # (load, row)
    full: list[tuple[int, float, int]] = []  # (-room, load, row): set aside until samples are short enough for it
    for i in order:
        while full and -full[0][0] >= lengths[i]:
            heapq.heappush(heap, heapq.heappop(full)[1:])
        while heap and room[heap[0][1]] < lengths[i]:
            load, row = heapq.heappop(heap)
            heapq.heappush(full, (-room[row], load, row))
        if not heap:
            return []
        load, row = heap[0]
        heapq.heapreplace(heap, (load + loads[i], row))
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def _first_fit(order: list[int], lengths: Mapping[int, int], budget_tokens: int) -> list[list[int]]:
    """Each sample, longest first, into the first row that has room for it: of rows without a load that is the least."""
    rows = _least_loaded(order, lengths, dict.fromkeys(order, 0), budget_tokens, len(order))
    return [row for row in rows if row]
