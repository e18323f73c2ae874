"""Times by which requests must have begun, or ended."""

from __future__ import annotations

import math


class Deadlines:
    """Of live sequences, by id. Looking at the clock costs nothing until the next one is due."""

    def __init__(self) -> None:
        self._begin_by: dict[int, float] = {}
        self._end_by: dict[int, float] = {}
        self._next = math.inf  # no deadline is earlier; may lag behind when sequences end

    def add(self, seq: int, now: float, queue_ms: float | None, total_ms: float | None) -> None:
        """From now on: so many milliseconds to begin, and to end."""
        for times, after_ms in ((self._begin_by, queue_ms), (self._end_by, total_ms)):
            if after_ms is not None:
                times[seq] = now + after_ms / 1000.0
                self._next = min(self._next, times[seq])

    def forget(self, seq: int) -> None:
        """It has ended."""
        self._begin_by.pop(seq, None)
        self._end_by.pop(seq, None)

    def due(self, now: float) -> list[tuple[int, bool]]:
        """Sequences whose time is up, once each and only once; true: unless it has begun."""
        if now < self._next:
            return []
        ended = {seq: False for seq, at in self._end_by.items() if at <= now}
        waited = {seq: True for seq, at in self._begin_by.items() if at <= now}
        for seq in waited:
            del self._begin_by[seq]
        for seq in ended:
            del self._end_by[seq]
        self._next = min([*self._begin_by.values(), *self._end_by.values()], default=math.inf)
        return list({**waited, **ended}.items())
