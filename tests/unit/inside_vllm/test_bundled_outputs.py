"""Entries of vLLM's engine, by classes of the same shape: what is sent when, and that nothing is lost or reordered."""

import enum
import queue
import random
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from torchtitan.grpo.inside_vllm.bundled_outputs import (
    INLINE_BYTES,
    LARGE_PER_MESSAGE,
    VARIABLE,
    Bundles,
    Step,
    install,
    messages,
    tokens_per_entry,
)
from torchtitan.grpo.inside_vllm.whole_update import TAKE


class Reason(enum.IntEnum):
    STOP = 0  # as vLLM's is: falsy


class Logprobs(NamedTuple):
    ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    bounds: list[int] | None = None

    def slice_request(self, row: int, count: int) -> "Logprobs":
        return Logprobs(*(part[row : row + count] for part in self[:3]))


class Masks(NamedTuple):
    token_ids: np.ndarray
    offsets: np.ndarray | None = None


class Entry(msgspec.Struct):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: Reason | None = None
    prefill_stats: Any = None
    pooling_output: Any = None
    routed_experts: Any = None
    new_sampling_mask: Any = None
    num_nans: int = 0


def entry(request: str, *tokens: int, width: int = 1, **others: Any) -> Entry:
    """`width`: vLLM gives each token as many log-probabilities as any request of the step asks for."""
    ids = np.array(tokens, dtype=np.int32)[:, None] + np.arange(width, dtype=np.int32)
    return Entry(request, list(tokens), Logprobs(ids, -ids / 10, ids[:, 0] * 2), **others)


def bundles(tokens: int = 4) -> Bundles:
    return Bundles(tokens, Entry, lambda request: not request.startswith("stream"))


def sent(held: Bundles, *entries: Entry) -> list[tuple[str, list[int]]]:
    return [(e.request_id, e.new_token_ids) for e in held.pass_through(0, entries)]


def test_tokens_wait_until_there_are_enough_or_the_answer_ends() -> None:
    held = bundles()
    assert [sent(held, entry("a", i)) for i in range(1, 5)] == [[], [], [], [("a", [1, 2, 3, 4])]]
    assert sent(held, entry("a", 5)) == []
    assert sent(held, entry("a", 6, finish_reason=Reason.STOP)) == [("a", [5, 6])]
    assert sent(held, entry("a", 7, finish_reason=Reason.STOP)) == [("a", [7])]  # another request of that name
    assert held.take() == {}


def test_log_probabilities_stay_with_their_tokens() -> None:
    held = bundles(3)
    held.pass_through(0, [entry("a", 1), entry("b", 9)])
    held.pass_through(0, [entry("a", 2)])
    (whole,) = held.pass_through(0, [entry("a", 3, 4)])
    assert whole.new_token_ids == [1, 2, 3, 4]
    assert whole.new_logprobs.ids.tolist() == [[1], [2], [3], [4]]
    np.testing.assert_allclose(whole.new_logprobs.logprobs[:, 0], [-0.1, -0.2, -0.3, -0.4])
    assert whole.new_logprobs.ranks.tolist() == [2, 4, 6, 8]
    assert whole.new_logprobs.bounds is None
    without = Entry("c", [1]), Entry("c", [2], finish_reason=Reason.STOP)
    assert [e.new_logprobs for step in without for e in held.pass_through(0, [step])] == [None]


def test_a_token_has_the_log_probabilities_that_all_of_its_answer_s_steps_have() -> None:
    """Other requests, which ask for more, begin and end meanwhile."""
    held = bundles(4)
    for token, width in ((10, 1), (20, 3), (30, 2)):
        assert sent(held, entry("a", token, width=width), entry("b", token, width=width + 1)) == []
    one, two = held.pass_through(0, [entry("a", 40, width=3), entry("b", 40, 50, width=4)])
    assert one.new_logprobs.ids.tolist() == [[10], [20], [30], [40]]
    assert two.new_logprobs.ids.tolist() == [[10, 11], [20, 21], [30, 31], [40, 41], [50, 51]]
    for whole in (one, two):
        np.testing.assert_allclose(whole.new_logprobs.logprobs, whole.new_logprobs.ids / -10)
        assert whole.new_logprobs.ranks.tolist() == [2 * token for token in whole.new_token_ids]


def test_kept_tokens_stay_with_their_tokens() -> None:
    held = bundles(4)
    masks = [Masks(np.array([1, 5])), Masks(np.array([2, 6, 7, 8]), np.array([0, 1, 4])), Masks(np.array([4]))]
    held.pass_through(0, [entry("a", 1, new_sampling_mask=masks[0]), entry("b", 1, new_sampling_mask=masks[2])])
    held.pass_through(0, [entry("a", 2, 7, new_sampling_mask=masks[1])])
    (whole,) = held.pass_through(0, [entry("a", 4, new_sampling_mask=masks[2])])
    assert whole.new_sampling_mask.token_ids.tolist() == [1, 5, 2, 6, 7, 8, 4]
    assert whole.new_sampling_mask.offsets.tolist() == [0, 2, 3, 6, 7]
    ((other,),) = held.take().values()
    assert other.new_token_ids == [1] and other.new_sampling_mask.token_ids.tolist() == [4]


def test_an_entry_with_more_than_tokens_is_sent_with_what_waited() -> None:
    held = bundles()
    assert sent(held, entry("a", 1, prefill_stats="cached")) == [("a", [1])]
    assert sent(held, entry("a", 2)) == []
    assert sent(held, entry("a", 3, pooling_output=np.zeros(5))) == [("a", [2, 3])]
    assert sent(held, entry("a", 4)) == []
    assert sent(held, entry("a", 5, num_nans=1)) == [("a", [4, 5])]
    assert sent(held, entry("a", 6)) == []
    assert sent(held, Entry("a", [], finish_reason=Reason.STOP)) == [("a", [6])]


def test_a_request_whose_tokens_are_read_at_once_does_not_wait() -> None:
    assert sent(bundles(), entry("stream", 1), entry("a", 2)) == [("stream", [1])]


def test_all_that_waits_can_be_taken_and_the_aborted_forgotten() -> None:
    held = bundles()
    held.pass_through(0, [entry("a", 1), entry("b", 2)])
    held.pass_through(1, [entry("c", 3)])
    held.keep_only({"a", "c"})
    taken = held.take()
    assert {client: [(e.request_id, e.new_token_ids) for e in entries] for client, entries in taken.items()} == {
        0: [("a", [1])],
        1: [("c", [3])],
    }
    assert taken[0][0].finish_reason is None
    assert held.take() == {}
    assert sent(held, entry("b", 3, finish_reason=Reason.STOP)) == [("b", [3])]


def experts(*positions: int) -> np.ndarray:
    """Of two layers with three experts each."""
    return np.array([[[i, i + 1, i + 2]] * 2 for i in positions], dtype=np.uint8)


def test_experts_wait_until_the_answer_ends_and_tokens_do_not() -> None:
    held = bundles(2)
    steps = [entry("a", 1, prefill_stats="cached", routed_experts=experts(0, 1, 2))]  # those of a prompt
    steps += [entry("a", i, routed_experts=experts(i)) for i in range(3, 8)]
    passed = [e for step in steps for e in held.pass_through(0, [step])]
    assert [e.new_token_ids for e in passed] == [[1], [3, 4], [5, 6]]
    assert all(e.routed_experts is None for e in passed)
    held.pass_through(0, [entry("b", 1, routed_experts=experts(50))])
    (last,) = held.pass_through(0, [entry("a", 8, finish_reason=Reason.STOP, routed_experts=experts(8))])
    assert last.new_token_ids == [7, 8]
    assert last.routed_experts.dtype == np.uint8
    assert last.routed_experts.tolist() == experts(*range(9)).tolist()
    (again,) = held.pass_through(0, [entry("a", 9, finish_reason=Reason.STOP, routed_experts=experts(9))])
    assert again.routed_experts.tolist() == experts(9).tolist()  # another request of that name


def test_experts_of_an_answer_that_is_read_at_once_are_sent_at_once() -> None:
    held = bundles()
    for reason in (None, Reason.STOP):
        (sent_at_once,) = held.pass_through(0, [entry("stream", 1, finish_reason=reason, routed_experts=experts(1))])
        assert sent_at_once.routed_experts.tolist() == experts(1).tolist()


def test_experts_are_taken_before_an_abort_and_not_before_new_weights() -> None:
    held = bundles(2)
    held.pass_through(0, [entry("a", 1, routed_experts=experts(1)), entry("b", 2, routed_experts=experts(2))])
    held.pass_through(1, [entry("c", 3, routed_experts=experts(3)), entry("d", 4)])
    held.pass_through(0, [entry("a", 2, routed_experts=experts(2))])  # its bundle has gone
    assert all(e.routed_experts is None for entries in held.take().values() for e in entries)
    held.keep_only({"a", "c", "d"})
    taken = held.take(experts=True)
    assert {client: [(e.request_id, e.new_token_ids) for e in entries] for client, entries in taken.items()} == {
        0: [("a", [])],
        1: [("c", [])],
    }
    assert taken[0][0].routed_experts.tolist() == experts(1, 2).tolist() and taken[0][0].finish_reason is None
    assert held.take(experts=True) == {}


def test_entries_with_experts_are_few_to_a_message() -> None:
    plain = [entry(f"p{i}", 1) for i in range(3)]
    assert messages(plain) == [plain] and messages([]) == [[]]
    large = [entry(f"l{i}", 1, routed_experts=experts(1)) for i in range(LARGE_PER_MESSAGE + 2)]
    *first, rest = messages([plain[0], *large, *plain[1:]])
    assert [len(part) for part in first] == [LARGE_PER_MESSAGE, 2] and [*first[0], *first[1]] == large
    assert rest == plain


class Outputs(msgspec.Struct):
    outputs: list[Entry] = []


class Core:
    """Of vLLM's engine core and scheduler, what `install` wraps. A step ends with what `ending` says."""

    def __init__(self) -> None:
        params = SimpleNamespace(output_kind="final", detokenize=False)
        self.scheduler, self.output_queue, self.ending = self, queue.SimpleQueue(), ""
        self.requests = {name: SimpleNamespace(sampling_params=params) for name in ("a", "b", "c")}

    def update_from_output(self, entries: list[Entry], sampled: SimpleNamespace) -> dict[int, Outputs]:
        for row, e in enumerate(entries):
            e.new_logprobs = sampled.logprobs.slice_request(row, 1) if e.new_token_ids else None
        for ended in [e.request_id for e in entries if e.finish_reason is not None]:
            del self.requests[ended]
        if self.ending:
            self.finish_requests([self.ending])
            entries = [*entries, Entry(self.ending, [], finish_reason=Reason.STOP)]
        return {0: Outputs(entries)}

    def finish_requests(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]

    def collective_rpc(self, method: str) -> None: ...

    def set_weight_version(self, weight_version: str) -> None: ...

    def pause_scheduler(self, mode: str = "abort") -> None: ...


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    parts = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parts)
    monkeypatch.setitem(
        sys.modules, "vllm.v1.engine", SimpleNamespace(EngineCoreOutput=Entry, EngineCoreOutputs=Outputs)
    )
    monkeypatch.delenv(VARIABLE, raising=False)
    made = Core()
    install(made)
    return made


def joined(each: list[Logprobs]) -> Logprobs:
    """Of a step, as vLLM's workers give them."""
    return Logprobs(*(np.concatenate(parts) for parts in zip(*(own[:3] for own in each), strict=True)))


def step(core: Core, *entries: Entry) -> list[Entry]:
    """What a step sends."""
    sampled = SimpleNamespace(logprobs=joined([e.new_logprobs for e in entries]))
    (last,) = core.update_from_output(list(entries), sampled).values()
    queued = [core.output_queue.get_nowait()[1].outputs for _ in range(core.output_queue.qsize())]
    return [e for part in [*queued, last.outputs] for e in part]


def test_an_answer_that_ends_beside_a_request_that_fails_is_whole(core: Core) -> None:
    for i in range(5):
        assert step(core, *(entry(name, i, routed_experts=experts(i)) for name in "ab")) == []
    core.ending = "b"  # vLLM fails it while it makes the step's entries
    last = step(core, entry("a", 5, finish_reason=Reason.STOP, routed_experts=experts(5)))
    assert [(e.request_id, e.new_token_ids) for e in last] == [("a", [0, 1, 2, 3, 4, 5]), ("b", [0, 1, 2, 3, 4])]
    assert last[0].routed_experts.tolist() == experts(*range(6)).tolist()


def test_a_request_that_is_aborted_between_steps_is_forgotten(core: Core) -> None:
    step(core, entry("a", 0, routed_experts=experts(0)), entry("b", 0))
    core.finish_requests(["a"])
    core.pause_scheduler("abort")
    assert [e.request_id for e in core.output_queue.get_nowait()[1].outputs] == ["b"]
    assert core.output_queue.empty()


@pytest.mark.parametrize(("call", "told"), [("collective_rpc", TAKE), ("set_weight_version", "7@r")])
def test_a_pause_that_aborts_sends_experts_first_and_new_weights_send_tokens_alone(
    core: Core, call: str, told: str
) -> None:
    step(core, entry("a", 0, routed_experts=experts(0)))
    getattr(core, call)(told)
    (sent,) = core.output_queue.get_nowait()[1].outputs
    assert sent.new_token_ids == [0] and sent.routed_experts is None
    step(core, entry("a", 1, routed_experts=experts(1)))
    core.pause_scheduler("keep")
    assert core.output_queue.empty()
    core.pause_scheduler()
    (sent,) = core.output_queue.get_nowait()[1].outputs
    assert sent.new_token_ids == [1] and sent.routed_experts.tolist() == experts(0, 1).tolist()


@pytest.mark.parametrize("columns", [1, 2, 6, 40])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_no_array_of_a_bundle_is_sent_beside_its_message(columns: int, dtype: type) -> None:
    """`columns`: other requests of the batch may have asked for more log-probabilities a token."""
    held = bundles(64)
    alone = columns * np.dtype(dtype).itemsize
    sizes = []
    for i in range(200):
        ids = np.full((1, columns), i, dtype=dtype)
        end = Reason.STOP if i == 199 else None
        step = [Entry("a", [i], Logprobs(ids, ids.astype(np.float32), ids[:, 0]), end)]
        sent = held.pass_through(0, step)
        sizes += [e.new_logprobs.ids.nbytes for e in sent]
        if alone > INLINE_BYTES / 2:  # of a whole vocabulary, lists would take 40 ms for each token
            assert sent[0].new_logprobs.ids is ids
    assert max(sizes) < max(INLINE_BYTES, alone + 1)
    assert alone > INLINE_BYTES / 2 or max(sizes) > INLINE_BYTES / 2


@pytest.mark.parametrize("seed", range(20))
def test_every_token_arrives_once_and_in_order(seed: int) -> None:
    random_ = random.Random(seed)
    held = bundles(random_.randint(2, 9))
    made = {f"r{i}": list(range(100 * i, 100 * i + random_.randint(1, 40))) for i in range(6)}
    arrived: dict[str, list[int]] = {name: [] for name in made}
    rest = {name: list(tokens) for name, tokens in made.items()}
    while rest:
        step, width, most = [], random_.choice((1, 1, 4)), random_.randint(1, 2)
        for name in list(rest):
            if random_.random() < 0.7:
                count = random_.randint(1, most)
                tokens, rest[name] = rest[name][:count], rest[name][count:]
                step.append(entry(name, *tokens, width=width, finish_reason=None if rest[name] else Reason.STOP))
                if not rest[name]:
                    del rest[name]
        if step and width == most == 1:
            rows = Step(joined([e.new_logprobs for e in step]))
            for row, e in enumerate(step):
                e.new_logprobs = rows.slice_request(row, 1)
        entries = held.pass_through(0, step)
        if random_.random() < 0.1:
            entries += held.take().get(0, [])
        for e in entries:
            arrived[e.request_id] += e.new_token_ids
            ids, logprobs, ranks, _ = e.new_logprobs
            assert ids[:, 0].tolist() == e.new_token_ids and ranks.tolist() == (2 * ids[:, 0]).tolist()
            assert ids.dtype == ranks.dtype == np.int32 and np.array_equal(logprobs, -ids / 10)
    assert arrived == made


def test_the_variable_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tokens_per_entry() == 32
    monkeypatch.setenv(VARIABLE, "1")
    assert tokens_per_entry() == 1
    for wrong in ("0", "-3", "many", ""):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match="at least 1"):
            tokens_per_entry()
