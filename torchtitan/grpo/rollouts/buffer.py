"""Groups between their first request and the step that trains on them, and how old their weights may become.

Pure bookkeeping, for one thread: no clock, no network. With A the largest age and B groups a step, versions count
optimizer steps: the step that makes version v + 1 trains at version v, and has consumed v * B groups before it.

- A group may begin on a server at version s if, with it, consumed and begun groups are at most (s + A + 1) * B.
- Its deadline is version s + A, s being the version at its beginning: no token of it is older.
- A step takes complete groups in the order of their deadlines, and only so that all others can still meet theirs.

So the groups whose deadline has come are never more than a step takes: nothing has to be dropped, and no step is
trained on older tokens than the bound, however long an answer takes. (Admission by version is AReaL's, arXiv
2505.24298; the deadlines, by which the bound holds for every token, are this project's.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchtitan.grpo.data.samples import Group, Prompt, Sample


@dataclass(eq=False)
class Entry:
    """One group that was asked and not yet trained on.

    Attributes:
        number: Counts the groups of the run, in the order of their prompts.
        occurrence: How many groups of the same `number // B`, asked and not yet trained on, have the same prompt.
        begun: Weight version of the server at its first request, None before that; no token is older.
        group: Its samples, once they are complete and scored.
        answered: They are complete, and are being scored.
    """

    number: int
    prompt: Prompt
    occurrence: int = 0
    begun: int | None = None
    group: Group | None = None
    answered: bool = False


class StalenessBuffer:
    """See the module.

    Args:
        groups_per_step: B, `[grpo] prompts_per_step`.
        max_age: A, `[async_grpo] max_trajectory_age_steps`, 0 without it.
        window: A step takes groups out of this many oldest ones; at least B.
        late: What `take` does with groups whose deadline has come and which are not complete: the step is not ready
            before they are ("wait"), or goes without them ("drop").
        surplus: Groups that may begin beyond the bound (`[grpo] oversampling`), of which as many may become too old.
    """

    def __init__(
        self, groups_per_step: int, max_age: int, window: int, late: Literal["wait", "drop"] = "wait", surplus: int = 0
    ) -> None:
        if window < groups_per_step:
            raise ValueError(f"a window of {window} groups holds no step of {groups_per_step}")
        self.groups_per_step = groups_per_step
        self.max_age = max_age
        self.window = window
        self.late = late
        self.surplus = surplus
        self.version = 0
        """Of the weights that the next step trains."""
        self.next_number = 0
        self.entries: dict[int, Entry] = {}
        """By number, in that order."""
        self._begun = 0  # how many of them have begun

    @property
    def consumed(self) -> int:
        return self.version * self.groups_per_step

    def room(self, server_version: int) -> int:
        """How many more groups may be added now, to begin on a server at this version."""
        if server_version + self.max_age < self.version:
            return 0
        return self._allowed(server_version) - self.consumed - len(self.entries)

    def may_begin(self, server_version: int) -> int:
        """How many more of the groups that are there, but have not begun, may begin on a server at this version."""
        if server_version + self.max_age < self.version:
            return 0
        return max(0, self._allowed(server_version) - self.consumed - self._begun)

    def add(self, prompt: Prompt) -> Entry:
        block = range(self.next_number - self.next_number % self.groups_per_step, self.next_number)
        others = (self.entries[number] for number in block if number in self.entries)
        entry = Entry(self.next_number, prompt, sum(other.prompt.index == prompt.index for other in others))
        self.entries[entry.number] = entry
        self.next_number += 1
        return entry

    def min_version(self, entry: Entry) -> int:
        """The oldest weights that a request of this group may be answered by now."""
        if entry.begun is not None:
            return entry.begun
        steps = -(-(self.consumed + self._begun + 1 - self.surplus) // self.groups_per_step)  # rounded up
        # The surplus is no leave to begin with weights that are too old already.
        return max(0, self.version - self.max_age, steps - self.max_age - 1)

    def begin(self, entry: Entry, server_version: int) -> None:
        """A request of the group goes to a server at this version, at least `min_version`."""
        if server_version < self.min_version(entry):
            raise AssertionError(f"group {entry.number} began at {server_version}, before {self.min_version(entry)}")
        if entry.begun is None:
            entry.begun = server_version
            self._begun += 1

    def finish(self, entry: Entry, group: Group) -> None:
        entry.group = group

    def drop(self, entry: Entry) -> None:
        """The group will not be trained on; another may be asked for it."""
        self._remove(entry)

    def deadline(self, entry: Entry) -> int:
        """The last version that may be trained on it."""
        return (self.version if entry.begun is None else entry.begun) + self.max_age

    def ready(self, but_for_scores: bool = False) -> list[Entry] | None:
        """The groups that the next step takes, by number, or None if it has to wait.

        Args:
            but_for_scores: What it would be if all answers that are there were scored.
        """
        oldest = self._oldest_first(self.entries.values())
        complete = [
            entry for entry in oldest[: self.window] if entry.group is not None or (but_for_scores and entry.answered)
        ]
        if len(complete) < self.groups_per_step:
            return None
        batch = complete[: self.groups_per_step]
        taken = set(batch)
        # Groups that have not begun meet their deadlines by themselves: they begin only if there is room for them.
        left = [entry for entry in oldest if entry.begun is not None and entry not in taken]
        if self.late == "wait" and not self._in_time(left):
            return None
        return sorted(batch, key=lambda entry: entry.number)

    def take(self) -> tuple[list[Entry], list[Entry]]:
        """End the wait: (the step's groups, groups that are too old for the next one and were dropped).

        Raises:
            AssertionError: `ready` is None, or a token is older than the bound.
        """
        batch = self.ready()
        if batch is None:
            raise AssertionError("no step is ready")
        for entry in batch:
            self._check_ages(entry)
            self._remove(entry)
        self.version += 1
        late = [entry for entry in self.entries.values() if self.deadline(entry) < self.version]
        for entry in late:
            self._remove(entry)
        return batch, late

    def state_dict(self) -> dict[str, Any]:
        """JSON values: complete groups whole; of the others only which prompts they are, since they are asked anew."""
        return {
            "version": self.version,
            "next_number": self.next_number,
            "entries": [
                {
                    "number": entry.number,
                    "prompt": entry.prompt.index,
                    "occurrence": entry.occurrence,
                    "begun": entry.begun if entry.group else None,
                    "samples": [_sample_state(sample) for sample in entry.group] if entry.group else None,
                }
                for entry in self.entries.values()
            ],
        }

    def load_state_dict(self, state: dict[str, Any], prompts_at: Callable[[list[int]], list[Prompt]]) -> None:
        """Restore; `prompts_at` gives the prompts of some indices. Groups that were not complete have not begun, nor
        have those any more that are too old for this buffer, whose age and groups a step may be others than before.
        """
        self.version, self.next_number = state["version"], state["next_number"]
        prompts = prompts_at([entry["prompt"] for entry in state["entries"]])
        self.entries = {}
        for saved, prompt in zip(state["entries"], prompts, strict=True):
            group = None if saved["samples"] is None else [Sample(prompt, **sample) for sample in saved["samples"]]
            entry = Entry(saved["number"], prompt, saved["occurrence"], saved["begun"], group)
            self.entries[entry.number] = entry
        begun = self._oldest_first(entry for entry in self.entries.values() if entry.begun is not None)
        while begun and (
            self.deadline(begun[0]) < self.version
            or (self.late == "wait" and not self._in_time(begun[self.groups_per_step :]))
        ):
            begun[0].begun = begun[0].group = None
            del begun[0]
        self._begun = len(begun)

    def _oldest_first(self, entries: Iterable[Entry]) -> list[Entry]:
        return sorted(entries, key=lambda entry: (self.deadline(entry), entry.number))

    def _remove(self, entry: Entry) -> None:
        del self.entries[entry.number]
        self._begun -= entry.begun is not None

    def _allowed(self, server_version: int) -> int:
        return (server_version + self.max_age + 1) * self.groups_per_step + self.surplus

    def _in_time(self, left: list[Entry]) -> bool:
        """Whether what this step leaves, oldest first, can be taken by later ones before it is too old, but for the
        surplus."""
        return all(
            waiting <= (self.deadline(entry) - self.version) * self.groups_per_step + self.surplus
            for waiting, entry in enumerate(left, 1)
        )

    def _check_ages(self, entry: Entry) -> None:
        for sample in entry.group:
            oldest = min(sample.sampled_versions, default=self.version)
            if self.version - oldest > self.max_age:
                raise AssertionError(
                    f"group {entry.number} has a token sampled at version {oldest}, older than "
                    f"[async_grpo] max_trajectory_age_steps = {self.max_age} before version {self.version}"
                )


def _sample_state(sample: Sample) -> dict[str, Any]:
    return {f.name: getattr(sample, f.name) for f in fields(sample) if f.name != "prompt"}
