"""A thread that steps an EngineCore while any caller waits, so that `generate` and `stream` work from many threads.

Callers hand in tickets and read events from their queue; the step thread alone touches the core, under a lock that
the step-level API shares.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

from miro_cy.core import EngineCore
from miro_cy.errors import EngineClosed, InternalError
from miro_cy.requests import Event

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted request. submit: adds it to the core and returns its id; events: where its events go, by index.

    choices: how many of its texts have not ended; each has a last event. sequences: what it counts for in the queue.
    """

    submit: Callable[[EngineCore], int]
    events: SimpleQueue[tuple[int, Event | Exception]]
    index: int = 0
    choices: int = 1
    sequences: int = 1
    request_id: int | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)


class Driver:
    """Runs the core on a thread of its own, started by the first ticket; idle, it sleeps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._lock = (
            threading.RLock()
        )  # the core; re-entrant, since a finaliser may close the engine on the step thread
        self._wake = threading.Condition()  # the fields below
        self._arrivals: deque[Ticket] = deque()
        self._cancels: deque[Ticket] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._tickets: dict[int, Ticket] = {}  # by request id; under the lock
        self._unclaimed: list[Event] = []  # events of requests added by hand, for the next manual step; under the lock

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, tickets: list[Ticket]) -> None:
        """Queue tickets; errors of adding them arrive as events. Raises EngineClosed."""
        with self._wake:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="miro-step", daemon=True)
                self._thread.start()
            self._arrivals.extend(tickets)
            self._wake.notify()

    def cancel(self, tickets: list[Ticket]) -> None:
        """Give up tickets whose events nobody reads any more."""
        with self._wake:
            self._cancels.extend(tickets)
            self._wake.notify()

    def close(self) -> None:
        """Stop after the current step; whoever still waits gets EngineClosed."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the step-level API --------------------------------------------------------------------------------------

    def manual_step(self) -> list[Event]:
        """One step by the caller; returns the events of requests that were added by hand."""
        with self._lock:
            self._deliver(self._core.step())
            events, self._unclaimed = self._unclaimed, []
            return events

    def manual(self, call: Callable[[EngineCore], T]) -> T:
        """Run call(core) between steps."""
        with self._lock:
            return call(self._core)

    @property
    def has_unclaimed(self) -> bool:
        return bool(self._unclaimed)

    # --- the step thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        backlog: deque[Ticket] = deque()
        try:
            self._serve(backlog)
        finally:
            with self._wake:  # nobody may wait for a thread that has ended, for whatever reason
                self._closed = True
                backlog.extend(self._arrivals)
                self._arrivals.clear()
            self._abandon(backlog)

    def _serve(self, backlog: deque[Ticket]) -> None:
        while self._take(backlog):
            with self._lock:
                self._admit(backlog)
                if self._tickets or backlog:  # a backlog alone waits for room that requests added by hand take up
                    self._deliver(self._core.step())

    def _take(self, backlog: deque[Ticket]) -> bool:
        """Move arrivals to the backlog, act on cancels, sleep while there is nothing to do. False when closed."""
        with self._wake:
            while not (self._closed or self._arrivals or self._cancels or backlog or self._tickets):
                self._wake.wait()
            backlog.extend(self._arrivals)
            self._arrivals.clear()
            cancels, self._cancels = self._cancels, deque()
            closed = self._closed
        with self._lock:
            for ticket in cancels:
                ticket.cancelled = True
                if ticket.request_id is not None:
                    self._core.abort(ticket.request_id)
        return not closed

    def _admit(self, backlog: deque[Ticket]) -> None:
        """Add tickets while the scheduler's queue has room; the rest stay here, in order."""
        while backlog and (backlog[0].cancelled or self._core.has_room(backlog[0].sequences)):
            ticket = backlog.popleft()
            if ticket.cancelled:
                continue
            try:
                ticket.request_id = ticket.submit(self._core)
            except Exception as error:
                ticket.events.put((ticket.index, error))
            else:
                self._tickets[ticket.request_id] = ticket

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            ticket = self._tickets.get(event.request_id)
            if ticket is None:
                self._unclaimed.append(event)
                continue
            if event.finish_reason is not None:
                ticket.choices -= 1
                if ticket.choices == 0:
                    del self._tickets[event.request_id]
            ticket.events.put((ticket.index, event))

    def _abandon(self, backlog: deque[Ticket]) -> None:
        with self._lock:
            for request_id in self._tickets:
                self._core.abort(request_id)
            waiting = [*self._tickets.values(), *backlog]
            self._tickets.clear()
            for ticket in waiting:
                ticket.events.put((ticket.index, EngineClosed("the engine was closed")))


def event_of(item: Event | Exception) -> Event:
    """The event, or raise what ended the request."""
    if isinstance(item, Exception):
        raise item
    if item.finish_reason == "error":
        raise item.error or InternalError("the request failed")
    return item
