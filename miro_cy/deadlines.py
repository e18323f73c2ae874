"""Times by which requests must have begun, or ended."""

from __future__ import annotations

import math


class Deadlines:
    """Of live requests, by id. Looking at the clock costs nothing until the next one is due."""

    def __init__(self) -> None:
        self._begin_by: dict[int, float] = {}
        self._end_by: dict[int, float] = {}
        self._next = math.inf  # no deadline is earlier; may lag behind when requests end

    def add(self, request: int, now: float, queue_ms: float | None, total_ms: float | None) -> None:
        """From now on: so many milliseconds to begin, and to end."""
        for times, after_ms in ((self._begin_by, queue_ms), (self._end_by, total_ms)):
            if after_ms is not None:
                times[request] = now + after_ms / 1000.0
                self._next = min(self._next, times[request])

    def forget(self, request: int) -> None:
        """It has ended."""
        self._begin_by.pop(request, None)
        self._end_by.pop(request, None)

    def due(self, now: float) -> list[tuple[int, bool]]:
        """Requests whose time is up, once each and only once; true: unless it has begun."""
        if now < self._next:
            return []
        ended = {request: False for request, at in self._end_by.items() if at <= now}
        waited = {request: True for request, at in self._begin_by.items() if at <= now}
        for request in waited:
            del self._begin_by[request]
        for request in ended:
            del self._end_by[request]
        self._next = min([*self._begin_by.values(), *self._end_by.values()], default=math.inf)
        return list({**waited, **ended}.items())
