"""Time to judge others by: what passed while this process did not run counts next to nothing.

A process may be stopped (by a signal, with its machine, or because others get the processors), mostly together with
whoever it waits for. A monotonic clock runs on meanwhile: who then finds that a limit has passed blames the other side
for its own absence, before that had a moment to answer. A leaf that client and worker share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

#: The longest that may count as one piece, in seconds: well below every limit that is watched so.
TICK_S = 0.2
TICK_MS = int(1e3 * TICK_S)


class AwakeClock:
    """Seconds, as of the last `tick`. One thread ticks, at least every TICK_S while it waits for a limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked = clock()
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def tick(self) -> None:
        """Count what has passed since the last tick, at most TICK_S of it."""
        now = self._clock()
        self._now += min(max(now - self._ticked, 0.0), TICK_S)
        self._ticked = now


def join_all(threads: Iterable[threading.Thread], seconds: float, clock: AwakeClock | None = None) -> bool:
    """Wait until all have ended, at most so many seconds for all together; whether they have."""
    clock = AwakeClock() if clock is None else clock
    began = clock()
    for thread in threads:
        while thread.is_alive():
            left = began + seconds - clock()
            if left <= 0.0:
                return False
            thread.join(min(left, TICK_S))
            clock.tick()
    return True
