"""A linear model of what a step costs, fitted on the fly to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

#: How much an observation keeps of its weight with each one that follows it.
FORGET = 0.9
#: What holds the coefficients that the observations leave open where they were, as a share of what these say.
RIDGE = 1e-3
#: A single time further than this from the expected one, up or down, is not believed: the process was suspended, say.
OUTLIER = 3.0
#: Observations before anything is called an outlier.
WARM = 4
SWEEPS = 30


class LinearCost:
    """seconds = sum of coefficient * quantity, no coefficient below 0.

    Least squares with exponential forgetting, kept as normal equations, which are solved by coordinate descent from the
    last solution when a prediction is wanted (Franc, Hlaváč, Navara: "Sequential coordinate-wise algorithm for the
    non-negative least squares problem", 2005). units: the usual size of each quantity.
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
        if self._solved:
            return self._theta
        theta, before = self._theta, list(self._theta)
        for _ in range(SWEEPS):
            change = 0.0
            for i, row in enumerate(self._gram):
                ridge = RIDGE * row[i]
                if row[i] <= 0.0:
                    continue
                rest = sum(g * t for g, t in zip(row, theta, strict=True)) - row[i] * theta[i]
                new = max(0.0, (self._moment[i] - rest + ridge * before[i]) / (row[i] + ridge))
                change = max(change, abs(new - theta[i]))
                theta[i] = new
            if change <= 1e-4 * max(theta):
                break
        self._solved = True
        return theta
