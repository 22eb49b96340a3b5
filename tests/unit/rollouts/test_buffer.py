"""The staleness buffer against a log of its own, over many simulated runs: no servers, no clock."""

import random
from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from torchtitan.grpo.data.group_arrays import from_bytes, to_bytes
from torchtitan.grpo.data.samples import Group, Prompt, Sample, TopTokens
from torchtitan.grpo.rollouts.buffer import Entry, StalenessBuffer

STEPS = 12


def group_of(prompt: Prompt, versions: list[int]) -> list[Sample]:
    tokens = len(versions)
    return [Sample(prompt, [5] * tokens, [-0.5] * tokens, list(versions), "stop", reward=1.0)] * 2


def prompt_of(index: int) -> Prompt:
    return Prompt(index, [1, 2, index], f"prompt {index}")


def prompts_at(indices: list[int]) -> list[Prompt]:
    return [prompt_of(index) for index in indices]


def as_saved(buffer: StalenessBuffer) -> dict:
    """Its state, from a file and back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(buffer.state_dict()))


@dataclass
class Outcome:
    """What a simulated run did, from its own log."""

    trained: list[list[int]]
    dropped: set[int]
    late: set[int]
    oldest_age: int
    waits: int


class Simulation:
    """Servers at versions of their own, a trainer, and groups that begin when they may and finish when they like.

    Args:
        slow: The share of groups that take many times as long as the others.
        reload: Now and then replace the buffer by one restored from its state, as a resumed run does.
        drop: The share of groups that are given up when they finish.
    """

    def __init__(self, seed: int, buffer: StalenessBuffer, slow: float, reload: bool, drop: float) -> None:
        self.random = random.Random(seed)
        self.buffer = buffer
        self.slow, self.reload, self.drop = slow, reload, drop
        self.servers = [0] * self.random.randint(1, 4)
        self.next_prompt = 0
        self.clock = 0
        self.due: dict[int, int] = {}
        """When each group that is under way is complete, by number."""
        self.began: dict[int, int] = {}
        """At which version each group began, as the simulation itself noted it."""
        self.prompts: dict[int, int] = {}
        self.waits = 0

    def run(self) -> Outcome:
        trained: list[list[int]] = []
        dropped: set[int] = set()
        late: set[int] = set()
        oldest_age = 0
        for version in range(STEPS):
            while not self.buffer.is_ready():
                self.advance(version, dropped)
            batch, too_old = self.buffer.take()
            groups = [entry.group is not None for entry in self.buffer.entries.values()]
            assert self.buffer.answered == self.buffer.complete == sum(groups)
            for entry in batch:
                age = version - min(entry.group[0].versions)
                assert version - self.began[entry.number] >= age
                oldest_age = max(oldest_age, age)
            trained.append([entry.number for entry in batch])
            late |= {entry.number for entry in too_old}
            for entry in too_old:
                self.due.pop(entry.number, None)
            for _ in range(self.random.randint(0, 3)):  # the trainer trains
                self.tick(version, dropped)
        assert len(self.prompts) == self.buffer.next_number
        return Outcome(trained, dropped, late, oldest_age, self.waits)

    def advance(self, version: int, dropped: set[int]) -> None:
        """Let time pass while the trainer waits; at the latest when nothing else can happen, servers catch up."""
        self.tick(version, dropped)
        self.waits += 1
        entries = self.buffer.entries.values()
        unable = [entry for entry in entries if entry.group is None and self.buffer.min_version(entry) > version]
        if len(unable) == sum(entry.group is None for entry in entries) and self.buffer.room(version) <= 0:
            assert self.buffer.is_ready(), "nothing is under way or can begin, and no step is ready"
        if self.waits % 20 == 0:
            self.servers = [version] * len(self.servers)
        assert self.waits < 10_000

    def tick(self, version: int, dropped: set[int]) -> None:
        buffer, chance = self.buffer, self.random
        self.clock += 1
        for i in range(len(self.servers)):
            if chance.random() < 0.3:
                self.servers[i] = chance.randint(self.servers[i], version)
        for _ in range(max(0, buffer.room(max(self.servers)))):
            entry = buffer.add(prompt_of(self.next_prompt))
            self.prompts[entry.number] = self.next_prompt
            self.next_prompt += 1
        waiting = [entry for entry in buffer.entries.values() if entry.begun is None]
        chance.shuffle(waiting)
        for entry in waiting:
            server = chance.choice(self.servers)
            if server >= buffer.min_version(entry) and chance.random() < 0.8:
                buffer.begin(entry, server)
                self.began[entry.number] = server
                long = chance.random() < self.slow
                self.due[entry.number] = self.clock + chance.randint(0, 3) + (chance.randint(20, 60) if long else 0)
        for number in [number for number, at in self.due.items() if at <= self.clock]:
            del self.due[number]
            entry = buffer.entries[number]
            if chance.random() < self.drop:
                buffer.drop(entry)
                dropped.add(number)
                continue
            newest = max(self.servers)
            versions = sorted(chance.randint(entry.begun, newest) for _ in range(3))
            buffer.finish(entry, group_of(entry.prompt, [entry.begun, *versions]))
        if self.reload and chance.random() < 0.1:
            self.restart()

    def restart(self) -> None:
        state = as_saved(self.buffer)
        old = self.buffer
        self.buffer = type(old)(old.groups_per_step, old.max_age, old.window, old.late, old.surplus)
        self.buffer.load_state_dict(state, prompts_at)
        assert self.buffer.state_dict() == state
        self.due = {}  # what was under way is asked anew
        for number, entry in self.buffer.entries.items():
            assert entry.prompt.index == self.prompts[number]
            assert (entry.begun is None) == (entry.group is None)
            assert entry.group == old.entries[number].group


def simulate(
    seed: int, kind: type[StalenessBuffer] = StalenessBuffer, may_reload: bool = True
) -> tuple[StalenessBuffer, Outcome]:
    chance = random.Random(f"settings/{seed}")
    per_step, max_age = chance.randint(1, 5), chance.randint(0, 4)
    surplus = chance.choice([0, 0, 1, 2])
    window = per_step + chance.choice([0, 0, 1, per_step, 4 * per_step])
    late = chance.choice(["wait", "drop"])
    buffer = kind(per_step, max_age, window, late, surplus)
    drop = chance.choice([0.0, 0.0, 0.2])
    run = Simulation(seed, buffer, chance.choice([0.0, 0.1, 0.3]), chance.random() < 0.4 and may_reload, drop)
    return buffer, run.run()


@pytest.mark.parametrize("block", range(10))
def test_no_run_trains_on_tokens_over_the_bound(block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        buffer, outcome = simulate(seed)
        assert outcome.oldest_age <= buffer.max_age, seed
        assert [len(step) for step in outcome.trained] == [buffer.groups_per_step] * STEPS
        numbers = [number for step in outcome.trained for number in step]
        assert len(set(numbers)) == len(numbers), "a group was trained twice"
        assert not set(numbers) & (outcome.dropped | outcome.late)
        assert all(step == sorted(step) for step in outcome.trained)
        if buffer.late == "wait":
            assert len(outcome.late) <= buffer.surplus * STEPS
            if not buffer.surplus:
                assert not outcome.late, seed
        elif not outcome.late and not outcome.dropped and buffer.max_age == 0 and buffer.surplus == 0:
            assert numbers == list(range(len(numbers)))


def test_the_simulated_runs_reach_the_bound_wait_and_drop() -> None:
    outcomes = [simulate(seed) for seed in range(200)]
    ages = {(buffer.max_age, outcome.oldest_age) for buffer, outcome in outcomes}
    assert {(age, age) for age in range(5)} <= ages
    assert any(outcome.late and buffer.late == "drop" for buffer, outcome in outcomes)
    assert any(outcome.late and buffer.late == "wait" for buffer, outcome in outcomes)
    assert any(outcome.dropped for _, outcome in outcomes)
    assert any(outcome.waits > 5 * STEPS for _, outcome in outcomes)


def test_the_simulation_notices_a_buffer_that_lets_groups_begin_too_early() -> None:
    class Lax(StalenessBuffer):
        def min_version(self, entry: Entry) -> int:
            return max(0, super().min_version(entry) - 1)

    class LaxAndSilent(Lax):
        def _check_ages(self, entry: Entry) -> None:
            pass

        def _in_time(self, left: Counter[int]) -> bool:
            return True

    with pytest.raises(AssertionError, match="has a token sampled at version"):
        for seed in range(40):
            simulate(seed, Lax, may_reload=False)  # a restart asks what is too old anew
    runs = (simulate(seed, LaxAndSilent, may_reload=False) for seed in range(40))
    over = [outcome.oldest_age > buffer.max_age for buffer, outcome in runs]
    assert any(over)


class Sorting(StalenessBuffer):
    """Answers by sorting all entries each time, and compares."""

    compared = 0

    def by_sorting(self, but_for_scores: bool) -> tuple[list[Entry] | None, bool]:
        """What `take` and `is_held` give."""
        oldest = sorted(self.entries.values(), key=lambda entry: (self.deadline(entry), entry.number))
        complete = [e for e in oldest[: self.window] if (e.answered if but_for_scores else e.group is not None)]
        if len(complete) < self.groups_per_step:
            return None, False
        batch = complete[: self.groups_per_step]
        left = [entry for entry in oldest if entry.begun is not None and entry not in batch]
        steps = [self.deadline(entry) - self.version for entry in left]
        late = any(k > n * self.groups_per_step + self.surplus for k, n in enumerate(steps, 1))
        if late and self.late == "wait":
            return None, True
        return sorted(batch, key=lambda entry: entry.number), False

    def compare(self) -> None:
        for scores in (False, True):
            expected, held = self.by_sorting(scores)
            assert self.is_ready(scores) == (expected is not None)
            assert scores or self.is_held() == held
            Sorting.compared += held
        values = self.entries.values()
        assert self.answered == sum(entry.answered for entry in values)
        assert self.complete == sum(entry.group is not None for entry in values)
        begun = sum(entry.begun is not None for entry in values)
        assert self.may_begin(self.version) == max(0, self._allowed(self.version) - self.consumed - begun)

    def answer(self, entry: Entry) -> None:
        super().answer(entry)
        self.compare()

    def begin(self, entry: Entry, server_version: int) -> None:
        super().begin(entry, server_version)
        self.compare()

    def finish(self, entry: Entry, group: Group) -> None:
        super().finish(entry, group)
        self.compare()

    def take(self) -> tuple[list[Entry], list[Entry]]:
        expected, _ = self.by_sorting(False)
        batch, late = super().take()
        assert batch == expected
        return batch, late


def test_a_wake_up_says_what_sorting_all_entries_says() -> None:
    Sorting.compared = 0
    for seed in range(60):
        simulate(seed, Sorting)
    assert Sorting.compared > 100, "too few steps were held by an old group"


@pytest.mark.parametrize("alone", [False, True], ids=["asked", "some answered by their environment"])
def test_slow_groups_of_every_age_hold_a_step_as_sorting_says(alone) -> None:
    Sorting.compared = 0
    for seed in range(12):
        chance = random.Random(seed)
        buffer = Sorting(chance.randint(2, 4), chance.randint(2, 4), 99)
        for _ in range(15):
            for _ in range(buffer.room(buffer.version)):
                entry = buffer.add(prompt_of(buffer.next_number))
                if not alone or chance.random() < 0.7:
                    oldest = buffer.min_version(entry)
                    buffer.begin(entry, chance.choice([oldest, chance.randint(oldest, buffer.version)]))
            left = [entry for entry in buffer.entries.values() if entry.group is None]
            slow = {entry.number for entry in left if chance.random() < 0.5}
            for entry in sorted(left, key=lambda entry: (entry.number in slow, chance.random())):
                if not buffer.is_ready():
                    buffer.finish(entry, group_of(entry.prompt, [] if entry.begun is None else [buffer.version]))
            buffer.take()
    assert Sorting.compared > 100, "too few steps were held by an old group"


def began(buffer: StalenessBuffer, server_version: int, count: int) -> list[Entry]:
    entries = [buffer.add(prompt_of(buffer.next_number)) for _ in range(count)]
    for entry in entries:
        buffer.begin(entry, server_version)
    return entries


def finish(buffer: StalenessBuffer, entries: list[Entry], version: int | None = None) -> None:
    for entry in entries:
        buffer.finish(entry, group_of(entry.prompt, [entry.begun if version is None else version] * 3))


def test_tokens_over_the_bound_are_refused() -> None:
    buffer = StalenessBuffer(2, 1, 4)
    buffer.version = 5
    entries = began(buffer, 4, 2)
    finish(buffer, entries, version=3)
    with pytest.raises(AssertionError, match=r"group 0 has a token sampled at version 3.* = 1 before version 5"):
        buffer.take()
    finish(buffer, entries, version=4)
    assert buffer.take() == (entries, [])


def test_one_old_token_of_one_sample_is_enough() -> None:
    buffer = StalenessBuffer(1, 2, 1)
    buffer.version = 7
    (entry,) = began(buffer, 5, 1)
    young, old = group_of(entry.prompt, [5, 6, 7])[0], group_of(entry.prompt, [4, 6, 7])[0]
    buffer.finish(entry, [young, old])
    with pytest.raises(AssertionError, match="version 4"):
        buffer.take()


def test_tokens_of_an_environment_have_no_age() -> None:
    buffer = StalenessBuffer(1, 1, 1)
    buffer.version = 7
    (entry,) = began(buffer, 6, 1)
    buffer.finish(entry, [Sample(entry.prompt, [5, 6, 7], [0.0, -1.0, 0.0], [0, 6, 6], "stop", [False, True, False])])
    assert buffer.take() == ([entry], [])


@pytest.mark.parametrize("surplus", [0, 1, 3])
def test_a_group_may_not_begin_on_weights_that_are_too_old(surplus: int) -> None:
    buffer = StalenessBuffer(2, 1, 8, surplus=surplus)
    buffer.version = 5
    assert buffer.room(3) == 0
    entry = buffer.add(prompt_of(0))
    assert buffer.min_version(entry) == 4
    with pytest.raises(AssertionError, match="group 0 began at 3, before 4"):
        buffer.begin(entry, 3)
    buffer.begin(entry, 4)
    buffer.begin(entry, 6)  # a request that was sent again
    assert (entry.begun, buffer.deadline(entry)) == (4, 5)


@pytest.mark.parametrize(("max_age", "surplus"), [(0, 0), (1, 0), (4, 0), (1, 2)])
def test_as_many_groups_may_begin_as_the_bound_allows(max_age: int, surplus: int) -> None:
    buffer = StalenessBuffer(3, max_age, 100, surplus=surplus)
    allowed = 3 * (max_age + 1) + surplus
    assert buffer.room(0) == allowed
    began(buffer, 0, allowed)
    assert (buffer.room(0), buffer.room(1)) == (0, 3)
    next_one = buffer.add(prompt_of(99))
    assert buffer.min_version(next_one) == 1
    with pytest.raises(AssertionError, match=f"group {allowed} began at 0, before 1"):
        buffer.begin(next_one, 0)
    buffer.drop(buffer.entries[0])
    assert buffer.min_version(next_one) == 0


def test_what_a_step_would_be_if_answers_were_scored() -> None:
    buffer = StalenessBuffer(2, max_age=0, window=2)
    first, second = (buffer.add(prompt_of(i)) for i in range(2))
    for entry in (first, second):
        buffer.begin(entry, 0)
    buffer.answer(first)
    buffer.answer(first)
    assert (buffer.answered, buffer.complete) == (1, 0)
    assert not buffer.is_ready(but_for_scores=True)
    buffer.finish(first, group_of(first.prompt, [0]))
    buffer.answer(second)
    assert buffer.is_ready(but_for_scores=True) and not buffer.is_ready()
    assert (buffer.answered, buffer.complete) == (2, 1)
    buffer.drop(second)
    buffer.answer(second)  # too late
    assert (buffer.answered, buffer.complete) == (1, 1)


def test_no_step_is_taken_that_is_not_ready() -> None:
    buffer = StalenessBuffer(2, 1, 4)
    finish(buffer, began(buffer, 0, 1))
    with pytest.raises(AssertionError, match="no step is ready"):
        buffer.take()


def test_without_ages_a_window_of_one_step_is_the_order_of_the_data() -> None:
    for seed in range(50):
        run = Simulation(seed, StalenessBuffer(3, 0, 3), slow=0.3, reload=False, drop=0.0)
        assert run.run().trained == [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(STEPS)]


def test_the_window_keeps_short_answers_from_crowding_out_long_ones() -> None:
    buffer = StalenessBuffer(2, 3, 4)
    entries = began(buffer, 0, 8)
    finish(buffer, entries[3:])
    assert not buffer.is_ready(), "only one of the four oldest is complete"
    finish(buffer, entries[1:2])
    assert buffer.take() == ([entries[1], entries[3]], [])


def test_a_step_waits_for_groups_that_would_be_too_old_for_the_next_one() -> None:
    buffer = StalenessBuffer(2, 1, 8)
    old = began(buffer, 0, 4)
    finish(buffer, old[:2])
    buffer.take()
    young = began(buffer, 1, 2)
    finish(buffer, young)
    finish(buffer, old[2:3])
    assert not buffer.is_ready(), "group 3 may be trained at version 1 at the latest"
    finish(buffer, old[3:])
    assert buffer.take() == (old[2:], [])
    assert buffer.take() == (young, [])


def test_late_groups_are_dropped_if_so_wished() -> None:
    buffer = StalenessBuffer(2, 1, 8, late="drop")
    old = began(buffer, 0, 4)
    finish(buffer, old[:2])
    buffer.take()
    young = began(buffer, 1, 2)
    finish(buffer, [old[2], *young])
    batch, late = buffer.take()
    assert (batch, late) == ([old[2], young[0]], [old[3]])
    assert list(buffer.entries.values()) == [young[1]]
    assert buffer.room(2) == 3 and buffer.room(1) == 1


def test_a_window_under_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 2 groups is too small for a step of 3"):
        StalenessBuffer(3, 1, 2)


def test_the_same_prompt_twice_in_a_step_is_counted() -> None:
    buffer = StalenessBuffer(3, 1, 6)
    assert [buffer.add(prompt_of(i)).occurrence for i in (7, 8, 7, 7, 7, 8)] == [0, 0, 1, 0, 1, 0]


def test_a_prompt_that_was_dropped_still_counts() -> None:
    """Else two groups of a step would have one seed, and the same answers. A resumed run counts it too."""
    buffer = StalenessBuffer(4, 0, 4)
    first, _ = buffer.add(prompt_of(7)), buffer.add(prompt_of(7))
    buffer.drop(first)
    resumed = StalenessBuffer(4, 0, 4)
    resumed.load_state_dict(as_saved(buffer), prompts_at)
    assert [each.add(prompt_of(7)).occurrence for each in (buffer, resumed)] == [2, 2]


@pytest.mark.parametrize("late", ["wait", "drop"])
@pytest.mark.parametrize(
    "after", [(2, 1), (2, 0), (1, 8), (4, 2)], ids=lambda after: f"{after[0]}-groups-age-{after[1]}"
)
def test_a_resumed_run_may_have_another_age_and_other_steps(after, late) -> None:
    before = StalenessBuffer(2, 2, 6)
    for version in range(3):  # asks as far ahead as it may
        for entry in began(before, version, before.room(version)):
            before.finish(entry, group_of(entry.prompt, [version]))
        before.take()
    groups_per_step, max_age = after
    buffer = StalenessBuffer(groups_per_step, max_age, 9 * groups_per_step, late)
    buffer.load_state_dict(before.state_dict(), prompts_at)
    assert len(buffer.entries) == len(before.entries)
    for _ in range(12):
        for entry in list(buffer.entries.values()):
            if entry.begun is None and buffer.min_version(entry) <= buffer.version:
                buffer.begin(entry, buffer.version)
                buffer.finish(entry, group_of(entry.prompt, [buffer.version]))
        began_now = began(buffer, buffer.version, max(0, buffer.room(buffer.version)))
        for entry in began_now:
            buffer.finish(entry, group_of(entry.prompt, [buffer.version]))
        assert len(buffer.take()[0]) == groups_per_step


def test_a_resumed_run_asks_the_oldest_groups_anew_until_the_others_are_in_time() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        before = StalenessBuffer(chance.randint(1, 6), chance.randint(0, 6), 99)
        for version in range(chance.randint(1, 5)):
            finish(before, began(before, version, before.room(version)), version)
            before.take()
        state = before.state_dict()
        buffer = StalenessBuffer(chance.randint(1, 6), chance.randint(0, 6), 99, chance.choice(["wait", "drop"]))
        buffer.load_state_dict(state, prompts_at)
        left = sorted((saved["begun"], saved["number"]) for saved in state["entries"] if saved["begun"] is not None)

        def late(left: list[tuple[int, int]], of: StalenessBuffer = buffer) -> bool:
            steps = [begun + of.max_age - of.version for begun, _ in left]
            waiting = steps[of.groups_per_step :]
            too_many = any(k > n * of.groups_per_step for k, n in enumerate(waiting, 1))
            return bool(left) and (steps[0] < 0 or (of.late == "wait" and too_many))

        while late(left):
            del left[0]
        kept = [(entry.begun, entry.number) for entry in buffer.entries.values() if entry.begun is not None]
        assert sorted(kept) == left
        assert buffer.complete == len(left)


def test_state_keeps_complete_groups_whole_and_asks_the_others_anew() -> None:
    buffer = StalenessBuffer(2, 1, 4)
    entries = began(buffer, 0, 3)
    sample = Sample(entries[0].prompt, [5, 6], [-1.5, 0.0], [0, 0], "stop", [True, False], "ab", {"f": 1.0}, 1.0)
    sample.teacher_logprobs, sample.servers = [-0.25, 0.0], [(0, "http://a:1"), (1, "http://b:1")]
    sample.routes = np.arange(3 * 2 * 2, dtype=np.int16).reshape(3, 2, 2)
    sample.top = TopTokens(np.array([[5, 9], [-1, 6]], np.int32), np.array([[-0.1, -3], [-np.inf, 0]], "f4"))
    unscored = replace(sample, reward=None, reward_failures={"g": "raised OSError: down"})
    compacted = replace(sample, prompt=replace(sample.prompt, token_ids=[7, 8, 9], text="a summary"))
    buffer.finish(entries[0], [sample, unscored, compacted])
    buffer.answer(entries[1])
    state = as_saved(buffer)
    refused = StalenessBuffer(2, 1, 4)
    refused.load_state_dict(state, prompts_at, lambda group: False)
    assert [(entry.begun, entry.group) for entry in refused.entries.values()] == [(None, None)] * 3
    assert refused.complete == 0
    restored = StalenessBuffer(2, 1, 4)
    restored.load_state_dict(state, prompts_at)
    first, second, third = restored.entries.values()
    assert (first.number, first.begun, first.group) == (0, 0, [sample, unscored, compacted])
    for name in ("ids", "logprobs"):
        kept, own = (getattr(each.top, name) for each in (first.group[0], sample))
        assert kept.dtype == own.dtype and np.array_equal(kept, own)
    kept, own = first.group[0].routes, sample.routes
    assert kept.dtype == own.dtype and np.array_equal(kept, own)
    assert [(entry.begun, entry.group) for entry in (second, third)] == [(None, None)] * 2
    assert restored.room(0) == buffer.room(0)
    assert restored.min_version(third) == 0
    assert restored.add(prompt_of(9)).number == 3


def test_a_group_is_made_to_bytes_once(monkeypatch) -> None:
    made: list[int] = []

    def counted(group: list[Sample]) -> bytes:
        made.append(group[0].prompt.index)
        return to_bytes(group)

    monkeypatch.setattr("torchtitan.grpo.rollouts.buffer.to_bytes", counted)
    buffer = StalenessBuffer(2, 2, 6)
    entries = began(buffer, 0, 4)
    finish(buffer, entries[:2], 0)
    first = as_saved(buffer)
    assert made == [0, 1] and as_saved(buffer.copy()) == first == as_saved(buffer) and made == [0, 1]
    finish(buffer, entries[2:], 0)
    assert as_saved(buffer)["entries"][:2] == first["entries"][:2] and made == [0, 1, 2, 3]
    buffer.take()
    resumed = StalenessBuffer(2, 2, 6)
    resumed.load_state_dict(as_saved(buffer), prompts_at)
    assert as_saved(resumed) == as_saved(buffer) and made == [0, 1, 2, 3]


def test_a_group_that_is_asked_again_has_new_bytes() -> None:
    buffer = StalenessBuffer(1, 1, 2)
    finish(buffer, began(buffer, 0, 1), 0)
    resumed = StalenessBuffer(1, 1, 2)
    resumed.load_state_dict(as_saved(buffer), prompts_at, lambda group: False)
    [entry] = resumed.entries.values()
    assert as_saved(resumed)["entries"][0]["group"] is None
    resumed.begin(entry, 0)
    resumed.finish(entry, group_of(entry.prompt, [0, 1, 1]))
    assert from_bytes(as_saved(resumed)["entries"][0]["group"]) == entry.group


def test_a_state_may_leave_groups_out_that_were_completed_later() -> None:
    buffer = StalenessBuffer(2, 0, 2)
    entries = began(buffer, 0, 2)
    finish(buffer, entries, 0)
    saved = buffer.state_dict(complete={0})["entries"]
    assert [(entry["begun"], entry["group"] is None) for entry in saved] == [(0, False), (None, True)]
