"""Which waiting sequence is admitted next: the policies, behind one interface.

A policy orders sequences that were never admitted. What was admitted once keeps its place: it runs in the order of
admission, and returns before any other after a preemption. So a policy cannot starve what already runs, and needs no
care for the KV pool.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Protocol

from miro_cy.sched.config import SchedulerConfig

#: A generated token weighs so many prompt tokens: each takes a step's pass over its context, alone in its row.
GENERATED_WEIGHT = 2
#: Clients without live sequences whose debt is remembered.
MAX_IDLE_CLIENTS = 4096


class Policy(Protocol):
    """One thread; sequences are known by their ids."""

    def add(self, seq: int, now: float, priority: int, client: str) -> None:
        """A sequence begins to wait."""

    def next(self) -> int | None:
        """The one to admit next, None when none waits; the same until something changes."""

    def remove(self, seq: int) -> None:
        """It waits no longer: it was admitted, or cancelled."""

    def charge(self, seq: int, prompt: int, generated: int) -> None:
        """It was served, or is about to be, with so many tokens."""

    def forget(self, seq: int) -> None:
        """It has ended; it does not wait any more."""


class FirstCome:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()

    def add(self, seq: int, now: float, priority: int, client: str) -> None:
        self._waiting[seq] = None

    def next(self) -> int | None:
        return next(iter(self._waiting), None)

    def remove(self, seq: int) -> None:
        del self._waiting[seq]

    def charge(self, seq: int, prompt: int, generated: int) -> None:
        pass

    def forget(self, seq: int) -> None:
        pass


class PriorityWithAgeing(FirstCome):
    """The highest priority first, where ageing_s seconds of waiting weigh as much as one level.

    All age alike, so the order of two sequences never changes: it is that of arrival - priority * ageing_s. Whatever
    comes (range of priorities) * ageing_s later than a sequence waits behind it.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._order: list[tuple[float, int]] = []
        self._key: dict[int, float] = {}

    def add(self, seq: int, now: float, priority: int, client: str) -> None:
        self._key[seq] = now - priority * self._ageing_s
        insort(self._order, (self._key[seq], seq))

    def next(self) -> int | None:
        return self._order[0][1] if self._order else None

    def remove(self, seq: int) -> None:
        del self._order[bisect_left(self._order, (self._key.pop(seq), seq))]


class FairShare:
    """The client that was served least comes first, its own sequences in order of arrival.

    A virtual token counter a client (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Who comes
    back after a pause is lifted to the counter of whom was chosen last: being idle earns no credit. A debt is kept.
    """

    def __init__(self) -> None:
        self._client: dict[int, str] = {}  # of each live sequence
        self._live: dict[str, int] = {}  # live sequences of each client
        self._queue: dict[str, OrderedDict[int, None]] = {}  # of the clients that have one
        self._served: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # clients without live sequences that are in debt
        self._heap: list[tuple[int, int, str]] = []  # (served when pushed, a sequence, client); may lag behind
        self._floor = 0  # what the client chosen last had been served

    def add(self, seq: int, now: float, priority: int, client: str) -> None:
        self._client[seq] = client
        if client not in self._live:
            self._idle.pop(client, None)
            self._served[client] = max(self._served.get(client, 0), self._floor)
        self._live[client] = self._live.get(client, 0) + 1
        if client not in self._queue:
            self._queue[client] = OrderedDict()
            self._push(client, seq)
        self._queue[client][seq] = None

    def next(self) -> int | None:
        while self._heap:
            served, seq, client = self._heap[0]
            if client not in self._queue:
                heapq.heappop(self._heap)
            elif served != self._served[client]:
                heapq.heapreplace(self._heap, (self._served[client], seq, client))
            else:
                return next(iter(self._queue[client]))
        return None

    def remove(self, seq: int) -> None:
        client = self._client[seq]
        del self._queue[client][seq]
        if not self._queue[client]:
            del self._queue[client]

    def charge(self, seq: int, prompt: int, generated: int) -> None:
        client = self._client[seq]
        if prompt:
            self._floor = max(self._floor, self._served[client])
        self._served[client] += prompt + GENERATED_WEIGHT * generated

    def forget(self, seq: int) -> None:
        client = self._client.pop(seq)
        self._live[client] -= 1
        if self._live[client]:
            return
        del self._live[client]
        if self._served[client] <= self._floor:
            del self._served[client]
            return
        self._idle[client] = None
        if len(self._idle) > MAX_IDLE_CLIENTS:
            oldest, _ = self._idle.popitem(last=False)
            del self._served[oldest]

    def _push(self, client: str, seq: int) -> None:
        # Entries of clients whose queue has emptied stay until they come up, but not without bound.
        if len(self._heap) > 2 * len(self._queue) + 64:
            self._heap = [(self._served[c], next(iter(q)), c) for c, q in self._queue.items() if q]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._served[client], seq, client))


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that the settings name."""
    if config.policy == "priority":
        return PriorityWithAgeing(config.ageing_ms / 1000.0)
    return FairShare() if config.policy == "fair" else FirstCome()
