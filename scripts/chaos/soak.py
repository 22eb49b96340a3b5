"""Soak: the fleet's faults for an hour, and nothing may grow: memory, threads, descriptors, the length of a step."""

import statistics

from chaos.fleet import Fleet
from chaos.report import Row, row

GROWTH = {"descriptors": 16.0, "threads": 8.0, "MiB": 64.0}
"""How much more the last quarter may have than the second one, in the median."""
SLOWER = 1.5
"""How much longer its steps may be."""


class Soak(Fleet):
    """A long fleet run, and curves of what rank 0 and its rollout process hold."""

    def rows(self) -> list[Row]:
        self.wrong += self._growth()
        usage = self.watch.usage
        if not usage:
            return []
        ends = usage[len(usage) // 4], usage[-1]
        held = "; ".join(
            f"{name} {ends[0][column]:.0f} to {ends[1][column]:.0f}" for column, name in enumerate(GROWTH, 1)
        )
        minutes = (usage[-1][0] - usage[0][0]) / 60
        label = f"{minutes:.0f} min of all faults: {held}"
        survived = sum(not injection.wrong for injection in self.injections)
        return [row(f"soak, {self.servers} {self.engine}", label, len(self.injections), survived)]

    def _growth(self) -> list[str]:
        """What the last quarter has over the second one; the first one still fills caches."""
        usage, steps = self.watch.usage, [line["time/step_s"] for _, line in self.watch.steps]
        if len(usage) < 8:
            return ["the run was too short to tell whether anything grows"]
        wrong = []
        quarter = len(usage) // 4
        for column, (name, limit) in enumerate(GROWTH.items(), 1):
            before, after = (
                statistics.median(line[column] for line in part)
                for part in (usage[quarter : 2 * quarter], usage[-quarter:])
            )
            if after > before + limit:
                wrong.append(f"{name} of rank 0 and its rollout process went from {before:.0f} to {after:.0f}")
        quarter = len(steps) // 4
        before, after = statistics.median(steps[quarter : 2 * quarter]), statistics.median(steps[-quarter:])
        if after > SLOWER * before:
            wrong.append(f"a step went from {before:.2f} to {after:.2f} s in the median")
        return wrong
