"""The I/O thread: waits for messages, outcomes and times, and never for another thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import zmq

from miro_client.awake import TICK_MS, AwakeClock
from miro_client.errors import Restarted
from miro_worker.control import Desk
from miro_worker.dispatch import Dispatcher
from miro_worker.jobs import Outcome
from miro_worker.mailbox import Mailbox, Wakeup
from miro_worker.sessions import Sessions
from miro_worker.sockets import RouterSocket

log = logging.getLogger("miro.worker")

#: Messages taken in one turn, so that a flood of them does not keep output waiting.
MESSAGES_A_TURN = 64
CLOSING_TURNS = 16


class IOLoop:
    """Owns the sockets. `run` returns after `request_stop`, when every request has had its last message.

    awake: the clock by which deliveries judge clients; it ticks here.
    """

    def __init__(
        self,
        socket: RouterSocket,
        sessions: Sessions,
        dispatcher: Dispatcher,
        desks: Sequence[Desk],
        *,
        wakeup: Wakeup,
        outcomes: Mailbox[Outcome],
        awake: AwakeClock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._desks = desks
        self._wakeup = wakeup
        self._outcomes = outcomes
        self._awake = awake
        self._clock = clock
        self._grace_s: float | None = None  # once a stop was asked for
        self._stop_at: float | None = None

    def request_stop(self, grace_s: float) -> None:
        """Begin to drain; a later call can only shorten the grace. Takes no lock: signal handlers call it."""
        if self._grace_s is None or grace_s < self._grace_s:
            self._grace_s = grace_s
        self._wakeup.set()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for socket in (self._socket, *(desk.socket for desk in self._desks)):
            poller.register(socket.router, zmq.POLLIN)
            poller.register(socket.monitor, zmq.POLLIN)
        try:
            while not self._drained():
                more = self._turn()
                next_tend = self._tend()
                self._sessions.bury()
                poller.poll(0 if more else self._timeout_ms(next_tend))
                self._awake.tick()
            for _ in range(CLOSING_TURNS):  # what has come in meanwhile is refused, not ignored
                if not self._turn():
                    break
            self._sessions.end_all(Restarted("the worker stopped before the request was finished"))
        finally:
            self._outcomes.close()
            self._socket.close()
            for desk in self._desks:
                desk.socket.close()

    def _turn(self) -> bool:
        """Take what waits; True if there may be more."""
        self._wakeup.clear()
        more = False
        for desk in self._desks:
            more |= desk.turn()
        self._socket.refresh()
        self._sessions.bury()
        for outcome in self._outcomes.take(wait=False) or ():
            self._sessions.on_outcome(outcome)
        for _ in range(MESSAGES_A_TURN):
            inbound = self._socket.receive(self._clock())
            if inbound is None:
                return more or self._socket.more
            self._sessions.bury()
            self._dispatcher.handle(inbound)
        return True

    def _tend(self) -> float | None:
        """Look after slow clients. Returns when to do so again (awake time), None for not at all."""
        self._awake.tick()
        deliveries = [self._sessions.delivery, *(desk.delivery for desk in self._desks)]
        return min((at for delivery in deliveries if (at := delivery.tend()) is not None), default=None)

    def _timeout_ms(self, next_tend: float | None) -> int | None:
        """How long to poll; None, for ever, when there is no time to wait for."""
        if self._drained():
            return 0
        waits = [] if next_tend is None else [TICK_MS, _ms(next_tend - self._awake())]
        if self._stop_at is not None:
            waits.append(_ms(self._stop_at - self._clock()))
        return min(waits, default=None)

    def _drained(self) -> bool:
        """Whether a stop was asked for and nothing keeps it from happening."""
        if self._grace_s is None:
            return False
        now = self._clock()
        if self._stop_at is None:
            log.info("draining: %d requests are live, %.1f s of grace", len(self._sessions), self._grace_s)
            self._sessions.draining = True
            self._stop_at = now + self._grace_s
        self._stop_at = min(self._stop_at, now + self._grace_s)
        return now >= self._stop_at or not (len(self._sessions) or self._sessions.delivery.waiting)


def _ms(seconds: float) -> int:
    """Whole milliseconds, rounded up."""
    return max(0, int(seconds * 1e3) + 1)
