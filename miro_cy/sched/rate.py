"""How fast the queue moves, for the advice that a refused client gets."""

from __future__ import annotations

from collections import deque

#: Departures that the measured rate covers.
WINDOW = 32
#: Longest advice, in milliseconds.
MAX_RETRY_MS = 60_000


class QueueRate:
    """Times at which sequences left the queue for good: admitted for the first time, or cancelled while they waited."""

    def __init__(self, least_ms: float) -> None:
        self._least_ms = max(least_ms, 1.0)
        self._left: deque[float] = deque(maxlen=WINDOW)

    def left(self, now: float) -> None:
        """One place became free."""
        self._left.append(now)

    def retry_ms(self, now: float, oldest: float, n_waiting: int) -> int:
        """After how many milliseconds a place should be free.

        The window runs up to now, so that a queue which has stopped moving shows. Before anything has left, the age
        of the oldest of the n_waiting sequences, which arrived at `oldest`, says how long a place takes at least.
        """
        seconds = (now - self._left[0]) / len(self._left) if self._left else (now - oldest) / n_waiting
        return int(min(max(1000.0 * seconds, self._least_ms), MAX_RETRY_MS))
