"""Groups between their first request and the step that trains on them, and how old their weights may become.

Pure bookkeeping for one thread: no clock, no network. A is the largest age and B the groups per step. Versions count
optimizer steps: the step that makes version v + 1 trains at version v and has consumed v * B groups before it.

- A group may begin on a server at version s if, with it, consumed and begun groups are at most (s + A + 1) * B.
- Its deadline is version s + A, where s is the version at its beginning. None of its tokens is older than s.
- A step takes complete groups in the order of their deadlines, and only if all others can still meet theirs.

So at most B groups ever have their deadline at one step. Nothing has to be dropped, and no step trains on tokens older
than the bound, however long an answer takes. Admission by version is AReaL's (arXiv 2505.24298). The deadlines, by
which the bound holds for every token, are this project's.
"""

import copy
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.grpo.data.group_arrays import from_bytes, to_bytes
from torchtitan.grpo.data.samples import Group, Prompt


@dataclass(eq=False)
class Entry:
    """One group that was requested and not yet trained on.

    Attributes:
        number: Counts the groups of the run, in the order of their prompts.
        occurrence: How many earlier groups with the same `number // B` have the same prompt, wherever they are now.
        begun: Weight version of the server at the first request; None before that. No token is older.
        group: The samples, once they are complete and scored.
        answered: The samples are complete, and are being scored or have been.
        saved: The group as bytes, once a state has held it.
    """

    number: int
    prompt: Prompt
    occurrence: int = 0
    begun: int | None = None
    group: Group | None = None
    answered: bool = False
    saved: bytes | None = None

    def forget(self) -> None:
        """As if it had not begun."""
        self.begun = self.group = self.saved = None
        self.answered = False

    def state(self, is_whole: bool) -> dict[str, Any]:
        """MessagePack values: with `is_whole` the group too, else only what it is asked again by."""
        group = self.group if is_whole else None
        if group is not None and self.saved is None:
            self.saved = to_bytes(group)
        return {
            "number": self.number,
            "prompt": self.prompt.index,
            "occurrence": self.occurrence,
            "begun": None if group is None else self.begun,
            "group": None if group is None else self.saved,
        }


class StalenessBuffer:
    """The bound on age, kept by construction; the module's docstring has the rules.

    Args:
        groups_per_step: B, `[grpo] prompts_per_step`.
        max_age: A, `[async_grpo] max_trajectory_age_steps`; 0 in sync mode.
        window: A step takes groups from this many oldest ones; at least B.
        late: What happens to incomplete groups at their deadline. "wait": the step waits for them. "drop": the step
            goes on without them.
        surplus: Groups that may begin beyond the bound (`[grpo] oversampling`). As many may become too old.
    """

    def __init__(
        self, groups_per_step: int, max_age: int, window: int, late: Literal["wait", "drop"] = "wait", surplus: int = 0
    ) -> None:
        if window < groups_per_step:
            raise ValueError(f"a window of {window} groups is too small for a step of {groups_per_step}")
        self.groups_per_step = groups_per_step
        self.max_age = max_age
        self.window = window
        self.late = late
        self.surplus = surplus
        self.version = 0
        """Version of the weights that the next step trains."""
        self.next_number = 0
        self.entries: dict[int, Entry] = {}
        """By number, in ascending order."""
        self._occurrences: Counter[int] = Counter()  # of prompts, among the numbers with the last one's `number // B`
        self._begun: Counter[int] = Counter()  # entries by the version at which they began
        # (deadline, number) of entries in ascending order. A change searches and shifts pointers, and sorts nothing.
        self._all: list[tuple[int, int]] = []
        self._answered: list[tuple[int, int]] = []
        self._complete: list[tuple[int, int]] = []

    @property
    def answered(self) -> int:
        """Entries whose samples are complete, scored or not."""
        return len(self._answered)

    @property
    def complete(self) -> int:
        """Entries that have their group."""
        return len(self._complete)

    @property
    def consumed(self) -> int:
        return self.version * self.groups_per_step

    def room(self, server_version: int) -> int:
        """How many more groups may be added now that begin on a server at this version."""
        if server_version + self.max_age < self.version:
            return 0
        return self._allowed(server_version) - self.consumed - len(self.entries)

    def may_begin(self, server_version: int) -> int:
        """How many entries that have not begun may begin now on a server at this version."""
        if server_version + self.max_age < self.version:
            return 0
        return max(0, self._allowed(server_version) - self.consumed - self._begun.total())

    def add(self, prompt: Prompt) -> Entry:
        if self.next_number % self.groups_per_step == 0:
            self._occurrences.clear()
        entry = Entry(self.next_number, prompt, self._occurrences[prompt.index])
        self._occurrences[prompt.index] += 1
        self.entries[entry.number] = entry
        insort(self._all, self._key(entry))
        self.next_number += 1
        return entry

    def min_version(self, entry: Entry) -> int:
        """The oldest weight version that may answer a request of this group now."""
        return self.min_version_of_new() if entry.begun is None else entry.begun

    def min_version_of_new(self) -> int:
        """`min_version` of each group that has not begun."""
        steps = -(-(self.consumed + self._begun.total() + 1 - self.surplus) // self.groups_per_step)  # rounded up
        # The surplus must not begin with weights that are already too old.
        return max(0, self.version - self.max_age, steps - self.max_age - 1)

    def begin(self, entry: Entry, server_version: int) -> None:
        """A request of the group goes to a server at this version, at least `min_version`."""
        if server_version < self.min_version(entry):
            raise AssertionError(f"group {entry.number} began at {server_version}, before {self.min_version(entry)}")
        if entry.begun is None:
            lists = self._leave_lists(entry)
            entry.begun = server_version
            self._begun[server_version] += bool(lists)
            for keys in lists:
                insort(keys, self._key(entry))

    def answer(self, entry: Entry) -> None:
        """The group's samples are complete."""
        if not entry.answered and entry.number in self.entries:
            entry.answered = True
            insort(self._answered, self._key(entry))

    def finish(self, entry: Entry, group: Group) -> None:
        self.answer(entry)
        if entry.group is None:
            insort(self._complete, self._key(entry))
        entry.group = group

    def drop(self, entry: Entry) -> None:
        """Give the group up. Another may be requested in its place."""
        self._remove(entry)

    def deadline(self, entry: Entry) -> int:
        """The last version that may train on it."""
        return (self.version if entry.begun is None else entry.begun) + self.max_age

    def is_ready(self, but_for_scores: bool = False) -> bool:
        """Whether the next step need not wait.

        Args:
            but_for_scores: Count groups whose answers are complete but not yet scored.
        """
        complete = self._answered if but_for_scores else self._complete
        return self._has_step(complete) and (self.late == "drop" or self._in_time(self._left(complete)))

    def is_held(self) -> bool:
        """Whether the next step has enough groups, and waits only for one that would become too old."""
        return self._has_step(self._complete) and not self.is_ready()

    def take(self) -> tuple[list[Entry], list[Entry]]:
        """End the step's wait.

        Returns:
            The step's groups by number, and the groups dropped because they are too old for the next step.

        Raises:
            AssertionError: The step must wait, or a token is older than the bound.
        """
        if not self.is_ready():
            raise AssertionError("no step is ready")
        batch = [self.entries[number] for number in sorted(key[1] for key in self._complete[: self.groups_per_step])]
        for entry in batch:
            self._check_ages(entry)
            self._remove(entry)
        self.version += 1
        late = [entry for entry in self.entries.values() if self.deadline(entry) < self.version]
        for entry in late:
            self._remove(entry)
        self._sort()  # the deadline of those that have not begun is a version later
        return batch, late

    def copy(self) -> "StalenessBuffer":
        """The same groups, which may get their samples later. What is added or removed here does not change it."""
        copied = copy.copy(self)
        for name in ("entries", "_occurrences", "_begun", "_all", "_answered", "_complete"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    def state_dict(self, complete: Container[int] | None = None) -> dict[str, Any]:
        """MessagePack values. Complete groups are saved whole, as bytes that are made once, when a state first holds
        them. Of the others only the prompts: they are requested again.

        Args:
            complete: The numbers of the groups that may count as complete; by default all.
        """
        return {
            "version": self.version,
            "next_number": self.next_number,
            "occurrences": [list(pair) for pair in self._occurrences.items()],
            "entries": [entry.state(complete is None or entry.number in complete) for entry in self.entries.values()],
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        prompts_at: Callable[[list[int]], list[Prompt]],
        usable: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """Restore from `state_dict`.

        Incomplete groups count as not begun. So do groups that are not usable, or too old for this buffer: its age and
        groups per step may differ from before.

        Args:
            prompts_at: Returns the prompts with these indices.
        """
        self.version, self.next_number = state["version"], state["next_number"]
        self._occurrences = Counter(dict(state["occurrences"]))
        prompts = prompts_at([entry["prompt"] for entry in state["entries"]])
        self.entries = {}
        for saved, prompt in zip(state["entries"], prompts, strict=True):
            entry = Entry(saved["number"], prompt, saved["occurrence"], saved["begun"])
            if saved["group"] is not None:
                entry.group, entry.saved = from_bytes(saved["group"]), saved["group"]
            entry.answered = entry.group is not None
            if entry.group is not None and not usable(entry.group):
                entry.forget()
            self.entries[entry.number] = entry
        begun = sorted((e for e in self.entries.values() if e.begun is not None), key=self._key, reverse=True)
        left = Counter(self.deadline(entry) for entry in begun[: -self.groups_per_step])
        while begun and (self.deadline(begun[-1]) < self.version or (self.late == "wait" and not self._in_time(left))):
            entry = begun.pop()
            entry.forget()
            if len(begun) >= self.groups_per_step:
                left[self.deadline(begun[-self.groups_per_step])] -= 1
        self._sort()

    def _has_step(self, complete: list[tuple[int, int]]) -> bool:
        """Whether the window has a step's groups. If so, they are the first of all that are complete."""
        count = self.groups_per_step
        return len(complete) >= count and bisect_left(self._all, complete[count - 1]) < self.window

    def _left(self, complete: list[tuple[int, int]]) -> Counter[int]:
        """How many groups that have begun a step leaves, by deadline.

        Groups that have not begun need no check: they begin only if there is room for them. So there are never too many
        of the newest either, and one among those taken that never began does not matter.
        """
        left: Counter[int] = Counter()
        before = 0
        for begun in sorted(self._begun):
            deadline = begun + self.max_age
            taken = min(self.groups_per_step, bisect_left(complete, (deadline + 1,)))
            left[deadline], before = self._begun[begun] - (taken - before), taken
        return left

    def _key(self, entry: Entry) -> tuple[int, int]:
        return self.deadline(entry), entry.number

    def _leave_lists(self, entry: Entry) -> list[list[tuple[int, int]]]:
        """Take it out of the sorted lists, and return those that had it: none, if it was removed."""
        lists = [self._all, *[self._answered] * entry.answered, *[self._complete] * (entry.group is not None)]
        lists = lists if entry.number in self.entries else []
        for keys in lists:
            del keys[bisect_left(keys, self._key(entry))]
        return lists

    def _sort(self) -> None:
        entries = sorted(self.entries.values(), key=self._key)
        self._all = [self._key(entry) for entry in entries]
        self._answered = [self._key(entry) for entry in entries if entry.answered]
        self._complete = [self._key(entry) for entry in entries if entry.group is not None]
        self._begun = Counter(entry.begun for entry in entries if entry.begun is not None)

    def _remove(self, entry: Entry) -> None:
        self._leave_lists(entry)
        del self.entries[entry.number]
        if entry.begun is not None:
            self._begun[entry.begun] -= 1

    def _allowed(self, server_version: int) -> int:
        return (server_version + self.max_age + 1) * self.groups_per_step + self.surplus

    def _in_time(self, left: Counter[int]) -> bool:
        """Whether later steps can take so many groups, by deadline, before they are too old. The surplus is exempt."""
        waiting = 0
        for deadline in sorted(left):
            waiting += left[deadline]
            if left[deadline] > 0 and waiting > (deadline - self.version) * self.groups_per_step + self.surplus:
                return False
        return True

    def _check_ages(self, entry: Entry) -> None:
        for sample in entry.group:
            oldest = min(sample.sampled_versions, default=self.version)
            if self.version - oldest > self.max_age:
                raise AssertionError(
                    f"group {entry.number} has a token sampled at version {oldest}, older than "
                    f"[async_grpo] max_trajectory_age_steps = {self.max_age} before version {self.version}"
                )
