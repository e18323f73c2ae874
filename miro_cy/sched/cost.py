"""A linear model of what a step costs, fitted on the fly to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

#: How much an observation keeps of its weight with each one that follows it.
FORGET = 0.9
#: What holds the coefficients that the observations leave open where they were, as a share of what these say.
RIDGE = 1e-3
#: A single time further than this from the expected one, up or down, is not believed: the process was suspended, say.
OUTLIER = 3.0
#: Observations before anything is called an outlier.
WARM = 4


class LinearCost:
    """seconds = sum of coefficient * quantity, no coefficient below 0.

    Least squares with exponential forgetting, kept as normal equations, which are solved when a prediction is wanted:
    exactly, as there are few quantities. units: the usual size of each.
    """

    def __init__(self, units: Sequence[float]) -> None:
        n = len(units)
        self._units = tuple(units)
        self._gram = [[0.0] * n for _ in range(n)]
        self._moment = [0.0] * n
        self._theta = [0.0] * n
        self._solved = True
        self._doubted = False  # whether the last observation was an outlier
        self.n_seen = 0

    def observe(self, quantities: Sequence[float], seconds: float) -> None:
        """Take in a measurement. An outlier is cut down; a second one in a row is believed."""
        expected = self.predict(quantities) if self.n_seen >= WARM else 0.0
        outlier = expected > 0.0 and not expected / OUTLIER <= seconds <= expected * OUTLIER
        if outlier and not self._doubted:
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        self._doubted = outlier
        x = [q / unit for q, unit in zip(quantities, self._units, strict=True)]
        for i, row in enumerate(self._gram):
            for j in range(len(row)):
                row[j] = FORGET * row[j] + x[i] * x[j]
            self._moment[i] = FORGET * self._moment[i] + x[i] * seconds
        self.n_seen += 1
        self._solved = False

    def predict(self, quantities: Sequence[float]) -> float:
        """Seconds expected; 0 before anything was observed."""
        theta = self._solution()
        return sum(t * q / unit for t, q, unit in zip(theta, quantities, self._units, strict=True))

    def coefficients(self) -> list[float]:
        """Seconds that one of each quantity costs."""
        return [t / unit for t, unit in zip(self._solution(), self._units, strict=True)]

    def _solution(self) -> list[float]:
        if not self._solved:
            self._theta = self._solve()
            self._solved = True
        return self._theta

    def _solve(self) -> list[float]:
        """Of every set of coefficients that might be the positive ones, what least squares make of it; the best of
        those that come out without a negative one is the solution. If that is all of them, no other need be tried.
        """
        seen = [i for i, row in enumerate(self._gram) if row[i] > 0.0]
        moment = [m + RIDGE * self._gram[i][i] * self._theta[i] for i, m in enumerate(self._moment)]
        best: tuple[float, dict[int, float]] = (0.0, dict.fromkeys(seen, 0.0))  # by how much squares fall; solution
        for size in range(len(seen), 0, -1):
            for chosen in combinations(seen, size):
                found = self._least_squares(chosen, moment)
                gain = sum(moment[i] * x for i, x in zip(chosen, found, strict=True))
                if gain > best[0] and min(found) >= 0.0:
                    best = gain, {**dict.fromkeys(seen, 0.0), **dict(zip(chosen, found, strict=True))}
            if size == len(seen) and best[0] > 0.0:
                break
        return [best[1].get(i, before) for i, before in enumerate(self._theta)]

    def _least_squares(self, chosen: Sequence[int], moment: Sequence[float]) -> list[float]:
        """The coefficients chosen, all others being 0. The ridge keeps every pivot above 0."""
        rows = [[self._gram[i][j] for j in chosen] + [moment[i]] for i in chosen]
        for at, row in enumerate(rows):
            row[at] *= 1.0 + RIDGE
        for at, row in enumerate(rows):
            for below in rows[at + 1 :]:
                factor = below[at] / row[at]
                for j in range(at + 1, len(row)):
                    below[j] -= factor * row[j]
        found = [0.0] * len(chosen)
        for at in range(len(chosen) - 1, -1, -1):
            row = rows[at]
            known = sum(row[j] * found[j] for j in range(at + 1, len(chosen)))
            found[at] = (row[-1] - known) / row[at]
        return found
