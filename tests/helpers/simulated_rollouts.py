"""What the schedule of rollouts alone allows: the real `StalenessBuffer` and `Pace`, a simulated server and trainer.

The server runs up to `sequences` answers at once, all at the same speed, and queues the others in order of arrival. The
trainer takes `train_s` for a step; new weights are in service `push_s` later. Nothing else takes time.
"""

import heapq
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from async_bench.long_tail import draw_lengths

from torchtitan.grpo.data.samples import Prompt
from torchtitan.grpo.rollouts.buffer import Entry, StalenessBuffer
from torchtitan.grpo.rollouts.pace import Pace

FIRST, STEPS = 20, 60


@dataclass(frozen=True)
class Schedule:
    """A job and its server.

    Attributes:
        requests: In flight at the server, each a group, or with `turns` one answer.
        tokens_per_s: With all `sequences` running; with half of them `half` of it.
        order_window: `[async_grpo] order_window`; 0: all groups that the age allows.
    """

    prompts: int
    samples: int
    age: int
    sequences: int
    requests: int
    tokens_per_s: float
    train_s: float
    mean: float
    sigma: float
    max_answer: int
    turns: bool = False
    auto: bool = True
    half: float = 0.87
    push_s: float = 0.2
    order_window: int = 0

    def rate(self, running: int) -> float:
        """Tokens/s of all answers together: one pass over the model takes a + b * running."""
        share = running / self.sequences
        return self.tokens_per_s * share / (1 / self.half - 1 + share * (2 - 1 / self.half))


@dataclass
class _Server:
    schedule: Schedule
    version: int = 0
    waiting: deque = field(default_factory=deque)  # (entry, lengths) of requests that have no place
    queued: deque = field(default_factory=deque)  # (length, request) inside the server
    running: list = field(default_factory=list)  # heap of (its end by `passed`, number, request)
    passed: float = 0.0  # tokens of each running answer, if it has run from the start
    in_flight: int = 0
    count: int = 0

    def next_s(self) -> float:
        """Seconds until the next answer ends."""
        return max(0.0, self.running[0][0] - self.passed) * len(self.running) / self.schedule.rate(len(self.running))

    def run(self, seconds: float) -> None:
        if self.running:
            self.passed += seconds * self.schedule.rate(len(self.running)) / len(self.running)

    def dispatch(self, buffer: StalenessBuffer) -> None:
        while self.waiting and self.in_flight < self.schedule.requests:
            entry, lengths = self.waiting[0]
            if buffer.min_version(entry) > self.version:
                break
            self.waiting.popleft()
            buffer.begin(entry, self.version)
            self.in_flight += 1
            request = [entry, len(lengths)]
            self.queued.extend((length, request) for length in lengths)
        while self.queued and len(self.running) < self.schedule.sequences:
            length, request = self.queued.popleft()
            self.count += 1
            heapq.heappush(self.running, (self.passed + length, self.count, request))


def simulate(schedule: Schedule, steps: int = STEPS, seed: int = 0) -> tuple[list[tuple[float, int]], int]:
    """Seconds and answer tokens of each step, and the groups that were requested ahead at the end."""
    window = schedule.order_window or (schedule.age + 1) * schedule.prompts
    buffer = StalenessBuffer(schedule.prompts, schedule.age, window)
    pace = Pace(schedule.prompts, schedule.age, 0) if schedule.auto else None
    server = _Server(schedule)
    left: dict[int, int] = {}
    lengths_of: dict[int, list[int]] = {}
    now, free_at, taken_at, held_since = 0.0, 0.0, 0.0, None
    published: deque[tuple[float, int]] = deque()
    result: list[tuple[float, int]] = []

    def fill() -> None:
        room = buffer.room(server.version)
        for _ in range(room if pace is None else min(room, pace.room(len(buffer.entries), buffer.answered))):
            entry = buffer.add(Prompt(buffer.next_number, [], ""))
            drawn = (entry.number + seed * 10**6, schedule.samples, schedule.mean, schedule.sigma, schedule.max_answer)
            lengths_of[entry.number] = lengths = draw_lengths(*drawn)
            left[entry.number] = len(lengths)
            server.waiting.extend((entry, part) for part in ([[n] for n in lengths] if schedule.turns else [lengths]))
        server.dispatch(buffer)

    fill()
    while len(result) < steps:
        events = [now + server.next_s()] if server.running else []
        events += [published[0][0]] if published else []
        events += [free_at] if free_at > now else []
        then = min(events)
        server.run(then - now)
        now = then
        while server.running and server.running[0][0] <= server.passed + 1e-9:
            _, _, request = heapq.heappop(server.running)
            entry: Entry = request[0]
            request[1] -= 1
            server.in_flight -= request[1] == 0
            left[entry.number] -= 1
            if not left[entry.number]:
                buffer.finish(entry, [])
        while published and published[0][0] <= now:
            server.version = published.popleft()[1]
        fill()
        if now < free_at:
            continue
        if not buffer.is_ready():
            if held_since is None and buffer.is_held():
                held_since = now
            continue
        batch, _ = buffer.take()
        lengths = [lengths_of.pop(entry.number) for entry in batch]
        if pace is not None:
            pace.taken([max(own) for own in lengths])
            if result:
                held_s = now - held_since if held_since is not None else 0.0
                pace.step(now - max(free_at, taken_at), now - taken_at, buffer.complete, held_s)
        result.append((now - taken_at, sum(map(sum, lengths))))
        taken_at, held_since, free_at = now, None, now + schedule.train_s
        published.append((free_at + schedule.push_s, buffer.version))
        fill()
    return result, pace.groups if pace else (schedule.age + 2) * schedule.prompts


def row_of(schedule: Schedule, seeds: int = 3) -> dict[str, float]:
    """Means over the seeds; the longest step is that of all."""
    runs = [simulate(schedule, seed=seed) for seed in range(seeds)]
    bound = schedule.tokens_per_s
    first = [steps[:FIRST] for steps, _ in runs]
    later = [steps[FIRST // 2 : -FIRST // 2] for steps, _ in runs]

    def share(parts: list[list[tuple[float, int]]]) -> float:
        return statistics.fmean(sum(t for _, t in part) / sum(s for s, _ in part) for part in parts) / bound

    medians = [statistics.median(s for s, _ in part) for part in later]
    longest = [max(s for s, _ in part) for part in later]
    return {
        "first_20_of_bound": share(first),
        "of_bound": share(later),
        "longest_to_median": max(most / median for most, median in zip(longest, medians, strict=True)),
    }
