"""The step thread: the only one that touches the engine's state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from miro_client.errors import InternalError
from miro_cy.requests import Event, Request
from miro_worker.jobs import Abort, Admitted, Failed, Job, Outcome, Prepared, Stepped
from miro_worker.mailbox import Mailbox
from miro_worker.text_loop import Preparer, as_request_error

log = logging.getLogger("miro.worker")

#: So many failed steps in a row, and the engine is given up.
MAX_FAILURES = 3
#: Steps granted to the engine at the end to give back what aborted requests hold.
CLOSING_STEPS = 8


class StepEngine(Preparer, Protocol):
    """The engine as the worker sees it."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def describe(self) -> dict[str, Any]: ...
    def warm_up(self) -> None: ...
    def add(self, request: Request) -> int: ...
    def abort(self, request_id: int) -> bool: ...
    def step(self) -> list[Event]: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def has_work(self) -> bool: ...


class StepLoop:
    """Adds, aborts, steps; tells the I/O thread. Blocks while there is no work.

    snapshot: the engine's stats after the last step, for the I/O thread, which must not wait for a step to end.
    """

    def __init__(
        self,
        engine: StepEngine,
        inbox: Mailbox[Prepared | Abort],
        outcomes: Mailbox[Outcome],
        *,
        on_fatal: Callable[[Exception], None],
        on_warm: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outcomes = outcomes
        self._on_fatal = on_fatal
        self._on_warm = on_warm
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._ids: dict[Job, int] = {}
        self._left: dict[int, int] = {}  # choices that have not ended, by request id
        self._failures = 0
        self._progress: float | None = None  # when the last step ended, None while idle
        self.snapshot: dict[str, Any] = engine.stats()
        self.warm = False  # whether the engine has generated a token

    def step_age_ms(self) -> float:
        """Milliseconds since the last step ended; 0 when idle. What a watchdog looks at; any thread."""
        progress = self._progress
        return 0.0 if progress is None else max(0.0, self._clock() - progress) * 1e3

    def run(self) -> None:
        if not self._warm_up():
            return
        must_step = False  # an abort's event comes with the next step, even if nothing else is to be done
        while True:
            idle = not must_step and not self._engine.has_work
            if idle:
                self._progress = None
            items = self._inbox.take(wait=idle)
            if items is None:
                break
            if idle:
                self._progress = self._clock()
            must_step = self._take(items)
            if must_step or self._engine.has_work:
                must_step = False
                if not self._step():
                    break
        self._close()

    def _warm_up(self) -> bool:
        """A first token, before anything is promised to anyone; False if there is none."""
        self._progress = self._clock()
        try:
            self._engine.warm_up()
            self.snapshot = self._engine.stats()
        except Exception as error:
            log.error("the engine cannot generate", exc_info=error)
            self._on_fatal(error)
            return False
        self.warm = True
        self._on_warm()
        return True

    def _take(self, items: list[Prepared | Abort]) -> bool:
        """Add and abort; True if something was aborted."""
        aborted = False
        outcomes: list[Outcome] = []
        for item in items:
            if isinstance(item, Prepared):
                outcomes += self._add(item)
            elif item.job in self._ids:
                aborted |= self._engine.abort(self._ids[item.job])
        if outcomes:
            self.snapshot = self._engine.stats()
            self._outcomes.put(outcomes)
        return aborted

    def _add(self, prepared: Prepared) -> list[Outcome]:
        job = prepared.job
        if job.cancelled:
            return []
        try:
            request_id = self._engine.add(self._request_of(prepared))
        except Exception as error:
            return [Failed(job, as_request_error(error, "adding the request"))]
        self._jobs[request_id] = job
        self._ids[job] = request_id
        self._left[request_id] = job.choices
        seed = prepared.request.params.seed
        waited_ms = (self._clock() - job.received) * 1e3
        return [Admitted(job, prepared.tokens, 0 if seed is None else seed, waited_ms)]

    def _request_of(self, prepared: Prepared) -> Request:
        """The request with what the scheduler looks at; what is left of its deadlines counts from now."""
        job = prepared.job
        waited_ms = (self._clock() - job.received) * 1e3
        return replace(
            prepared.request,
            priority=job.priority,
            client=job.client,
            queue_ms=_left(job.queue_ms, waited_ms),
            deadline_ms=_left(job.deadline_ms, waited_ms),
        )

    def _step(self) -> bool:
        """One step; False if the engine is given up."""
        try:
            events = self._engine.step()
            self.snapshot = self._engine.stats()
        except Exception as error:
            return self._failed(error)
        self._failures = 0
        self._progress = self._clock()
        self._publish(events)
        return True

    def _publish(self, events: list[Event]) -> None:
        outcomes: list[Outcome] = []
        for event in events:
            job = self._jobs.get(event.request_id)
            if job is None:
                continue
            outcomes.append(Stepped(job, event))
            if event.finish_reason is not None:
                self._left[event.request_id] -= 1
                if self._left[event.request_id] == 0:
                    self._forget(event.request_id)
        if outcomes:
            self._outcomes.put(outcomes)

    def _failed(self, error: Exception) -> bool:
        """A step raised, nobody knows for which request: all of them end, and the engine gets another chance."""
        log.error("a step failed; %d requests end with it", len(self._jobs), exc_info=error)
        self._failures += 1
        told = InternalError("the engine failed")
        failed: list[Outcome] = [Failed(self._forget(i), told) for i in self._abort_all()]
        self._outcomes.put(failed)
        if self._failures < MAX_FAILURES:
            return True
        self._on_fatal(error)
        return False

    def _abort_all(self) -> list[int]:
        ids = list(self._jobs)
        for request_id in ids:
            try:
                self._engine.abort(request_id)
            except Exception:
                log.exception("aborting request %d failed", request_id)
        return ids

    def _forget(self, request_id: int) -> Job:
        job = self._jobs.pop(request_id)
        del self._ids[job], self._left[request_id]
        return job

    def _close(self) -> None:
        """Leave the engine as it was found: nothing running, nothing held."""
        self._progress = None
        for request_id in self._abort_all():
            self._forget(request_id)
        try:
            for _ in range(CLOSING_STEPS):
                self._engine.step()
                if not self._engine.has_work:
                    break
            self.snapshot = self._engine.stats()
        except Exception:
            log.exception("the engine did not come to rest")


def _left(limit_ms: int | None, waited_ms: float) -> float | None:
    """What is left of a time limit; one that has passed ends the request with its first step, as any other does."""
    return None if limit_ms is None else max(limit_ms - waited_ms, 0.001)
