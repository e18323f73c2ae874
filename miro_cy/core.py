"""The step level: requests in, one batch step at a time, events out. One thread; no text thread, no sockets, no locks.

step():  plan (scheduler) -> forward (executor) -> pick tokens (sampler) -> text (streams) -> commit (scheduler)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miro_cy.batch import BatchView
from miro_cy.beams import Beamed
from miro_cy.cache.block_pool import BlockPool
from miro_cy.deadlines import Deadlines
from miro_cy.errors import InternalError, MiroError
from miro_cy.live import Choice, Live, Outcome, Rows, Sampled, Scored, Told
from miro_cy.prepare import prompt_tokens
from miro_cy.requests import Event, FinishReason, Request, Timing, Usage
from miro_cy.sampling.params import SamplingParams
from miro_cy.sched.scheduler import Scheduler
from miro_cy.text import Tokenizer

F32 = NDArray[np.float32]
log = logging.getLogger("miro")


class Executor(Protocol):
    """Where the model runs: on this CPU now, elsewhere later."""

    def forward(self, view: BatchView) -> F32:
        """Logits float32 [view.n_logits, vocab] of the view's rows, in order; valid until the next call."""


class EngineCore:
    """Owns the live requests. `add`, `score` and `abort` between steps, from the thread that calls `step`."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._pool = pool
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[int, Live] = {}  # by request id
        self._owner: dict[int, Live] = {}  # by sequence id
        self._deadlines = Deadlines()
        self._pending: list[Event] = []
        self._next_id = 1
        self._steps = 0
        self._given_up = 0  # sequences, for others of their requests
        self._last_step = clock()
        self._counts = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "finished": 0}

    # --- arrival and departure -----------------------------------------------------------------------------------

    def add(self, request: Request, max_new: int) -> int:
        """Queue a prepared request (token ids, seed fixed). Raises what Scheduler.add raises."""
        tokens, params = prompt_tokens(request), request.params
        request_id = self._next_id
        if max_new == 0:
            self._scheduler.check(len(tokens), 0)
            for choice in range(params.n_choices):
                usage = Usage(prompt_tokens=len(tokens))
                self._pending.append(Event(request_id, choice, finish_reason="length", usage=usage, timing=Timing()))
            self._next_id += 1
            return request_id
        live: Live
        if params.beam_width > 1:
            live = Beamed(request_id, tokens, params, max_new, self._tokenizer, self._scheduler)
        else:
            live = Sampled(request_id, len(tokens), params, max_new, self._tokenizer)
        seq = self._scheduler.add(
            tokens,
            max_new,
            choices=params.n_sequences,
            extras=_extras(params),
            priority=request.priority,
            client=request.client,
        )
        self._deadlines.add(request_id, self._clock(), request.queue_ms, request.deadline_ms)
        return self._begin(live, seq)

    def score(self, tokens: NDArray[np.int32], first: int, out: F32) -> int:
        """Fill out [len(tokens) - first, vocab] with the logits of tokens[first:]; ends like a request."""
        seq = self._scheduler.add(tokens, 0, logits_from=first)
        return self._begin(Scored(self._next_id, len(tokens), first, out), seq)

    def _begin(self, live: Live, seq: int) -> int:
        self._next_id += 1
        live.begin(seq)
        self._owner[seq] = self._requests[live.request_id] = live
        return live.request_id

    def abort(self, request_id: int) -> bool:
        """Cancel all its choices; blocks are free at once, the events come with the next step. False when not live."""
        live = self._requests.get(request_id)
        if live is None:
            return False
        self._pending += self._end(live, "cancelled")
        return True

    def warm_up(self, request: Request, max_new: int) -> None:
        """Run a prepared request to its end and leave no trace of it. Only at rest; raises what ended it early."""
        if self.has_work:
            return
        counts, steps = dict(self._counts), self._steps
        self.add(request, max_new)
        while self.has_work:
            for event in self.step():
                if event.error is not None:
                    raise event.error
        self._counts, self._steps = counts, steps

    def has_room(self, choices: int = 1) -> bool:
        """Whether the queue takes a request of so many choices."""
        return self._scheduler.has_room(choices)

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do or to tell."""
        return bool(self._requests or self._pending)

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one batch step; at most one event for each live choice. [] when there is nothing to do."""
        events, self._pending = self._pending, []
        for request_id, waiting in self._deadlines.due(self._clock()):
            live = self._requests[request_id]
            if not waiting or self._scheduler.times(next(iter(live.carried)))[1] is None:
                events += self._end(live, "deadline")
        ended: list[int] = []  # told so already, still held by the scheduler
        try:
            view = self._scheduler.plan()
            while view is None and self._make_room():
                view = self._scheduler.plan()
            if view is not None:
                began = self._clock()
                logits = self._executor.forward(view)
                out = self._read(view, logits, events, ended)
                sampled = np.array([out.tokens.get(seq, -1) for seq in self._scheduler.planned()], np.int32)
                self._scheduler.commit(sampled, max(0.0, self._clock() - began))
                self._go_on(out, events, ended)
                while ended:
                    self._scheduler.finish(ended.pop())
                self._fork(out)
        except Exception as error:
            # A bug, not a user's mistake: nobody may wait for an answer that will not come.
            log.exception("a step failed; its requests end with an error")
            for seq in ended:
                self._scheduler.finish(seq)
            # Whoever goes on after this step's event fails now, and a choice gets one event a step.
            events = [event for event in events if event.finish_reason is not None] + self._fail_all(error)
        self._steps += 1
        self._last_step = self._clock()
        return events

    def _read(self, view: BatchView, logits: F32, events: list[Event], ended: list[int]) -> Outcome:
        """What the requests make of the logits, each of all its rows; events come of it, and sequences to be ended."""
        rows: dict[int, list[Rows]] = {}
        at = 0
        for seq, (_, first, n_tok, n_log) in zip(self._scheduler.planned(), view.rows(), strict=True):
            if n_log > 0:
                request_id = self._owner[seq].request_id
                rows.setdefault(request_id, []).append(Rows(seq, at, at + n_log, first + n_tok))
                at += n_log
        out = Outcome()
        for request_id, taken in rows.items():
            told = self._requests[request_id].take(taken, logits, out)
            self._tell(told, events, ended)
        return out

    def _tell(self, told: list[Told], events: list[Event], ended: list[int]) -> None:
        """Complete a request's events; notes the sequences that end when the step is committed."""
        for seq, choice, event in told:
            self._counts["generated_tokens"] += len(event.tokens)
            events.append(event)
            if event.finish_reason is None or not self._close(self._owner[seq], seq, choice, event):
                continue
            if event.error is None:
                ended.append(seq)
            else:  # before the commit: others must not find what this step computed
                self._scheduler.finish(seq)

    def _fork(self, out: Outcome) -> None:
        """Give choices that leave a sequence one of their own."""
        for seq, token, choice in out.forks:
            live = self._owner[seq]
            forked = self._scheduler.fork(seq, token)
            live.carried[forked], self._owner[forked] = [choice], live
            live.drop(seq, choice)
        for seq in out.settled:
            self._scheduler.settle(seq)

    def _go_on(self, out: Outcome, events: list[Event], ended: list[int]) -> None:
        """Let requests change their sequences by themselves, and tell what comes of it."""
        for live in out.ready:
            before = [*live.carried, *live.others]
            try:
                told = live.go_on()
            finally:
                for seq in before:
                    del self._owner[seq]
                self._owner |= dict.fromkeys([*live.carried, *live.others], live)
            self._tell(told, events, ended)

    def _make_room(self) -> bool:
        """When nothing can be computed: end a sequence that only holds blocks, of the latest request that has one."""
        for live in reversed(self._requests.values()):
            seq = live.give_up()
            if seq is not None:
                del self._owner[seq]
                self._given_up += 1
                return True
        return False

    # --- the end of a request ------------------------------------------------------------------------------------

    def _close(self, live: Live, seq: int, choice: Choice, event: Event) -> bool:
        """Complete the last event of a choice; true: its sequence carries no other, and is to be finished."""
        choice.usage.cached_tokens = self._scheduler.cached_tokens(seq)
        event.usage, event.timing = choice.usage, self._timing(seq)
        was_last = live.drop(seq, choice)
        if was_last:
            del self._owner[seq]
        if not live.carried:
            for other in live.others:
                del self._owner[other]
                self._scheduler.finish(other)
            del self._requests[live.request_id]
            self._deadlines.forget(live.request_id)
            self._counts["finished"] += 1
            self._counts["prompt_tokens"] += live.choices[0].usage.prompt_tokens
            self._counts["cached_tokens"] += live.choices[0].usage.cached_tokens
        return was_last

    def _end(self, live: Live, reason: FinishReason, error: MiroError | None = None) -> list[Event]:
        """The last events of all choices that a request still has."""
        events = []
        for seq, choices in [*live.carried.items()]:
            for choice in [*choices]:
                events.append(live.event(choice, reason))
                events[-1].error = error
                self._close(live, seq, choice, events[-1])
            self._scheduler.finish(seq)
        return events

    def _fail_all(self, error: Exception) -> list[Event]:
        reason = error if isinstance(error, MiroError) else InternalError(f"the engine failed: {error}")
        return [event for live in [*self._requests.values()] for event in self._end(live, "error", reason)]

    def _timing(self, seq: int) -> Timing:
        now = self._clock()
        arrival, admitted, first_token = self._scheduler.times(seq)
        admitted = now if admitted is None else admitted
        first_token = now if first_token is None else first_token
        spans = (admitted - arrival, first_token - admitted, now - first_token)
        return Timing(*(1000.0 * max(0.0, span) for span in spans))

    # --- what can be seen ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and gauges since the start; times in milliseconds."""
        return {
            "running": self._scheduler.n_running,
            "waiting": self._scheduler.n_waiting,
            "free_blocks": self._pool.n_free,
            "cached_blocks": self._pool.n_cached,
            "total_blocks": self._pool.n_blocks,
            "evictions": self._pool.evictions,
            "preemptions": self._scheduler.preemptions + self._given_up,
            "steps": self._steps,
            "last_step_age_ms": 1000.0 * (self._clock() - self._last_step),
            **self._counts,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every KV block is accounted for (promise 3)."""
        self._scheduler.check_integrity()


def _extras(params: SamplingParams) -> list[tuple[bytes, bytes]]:
    """What keeps the cached blocks of a request apart from those of others, each with its tag."""
    return [] if params.cache_salt is None else [(b"salt", params.cache_salt.encode())]
