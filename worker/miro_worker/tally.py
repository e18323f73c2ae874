"""What the worker counts, for STATS: every GENERATE is in exactly one of live, ended, refused and abandoned."""

from __future__ import annotations

from collections import Counter


class Tally:
    """Counters since the start. Owned by the I/O thread.

    requests: GENERATEs received; ended: by the reason of their END; refused: by the code of their ERROR; abandoned:
    their connection was lost. errors: ERRORs to other messages, by code. dropped: replies that were not delivered.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.requests = 0
        self.ended: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.abandoned = 0
        self.errors: Counter[str] = Counter()
        self.dropped = 0
