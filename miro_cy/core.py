"""The step level: requests in, one batch step at a time, events out. One thread; no text thread, no sockets, no locks.

step():  plan (scheduler) -> forward (executor) -> pick tokens (sampler) -> text (streams) -> commit (scheduler)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.deadlines import Deadlines
from miro_cy.errors import InternalError, MiroError, NonFinite
from miro_cy.prepare import prompt_tokens
from miro_cy.requests import Event, FinishReason, Request, Timing, TokenLogprob, Usage
from miro_cy.sampling.params import SamplingParams
from miro_cy.sampling.sampler import TokenSampler
from miro_cy.sched.scheduler import Scheduler
from miro_cy.scoring import PromptScores
from miro_cy.text import TextStream, Tokenizer

F32 = NDArray[np.float32]
log = logging.getLogger("miro")


class Executor(Protocol):
    """Where the model runs: on this CPU now, elsewhere later."""

    def forward(self, view: BatchView) -> F32:
        """Logits float32 [view.n_logits, vocab] of the view's rows, in order; valid until the next call."""


@dataclass(slots=True)
class Choice:
    """One sequence of a request as the engine sees it: how its tokens are picked, turned into text, and ended.

    scores: of its prompt, if wanted, until they are complete and handed out.
    """

    request_id: int
    params: SamplingParams
    sampler: TokenSampler
    stream: TextStream
    max_new: int
    usage: Usage
    scores: PromptScores | None = None
    index: int = 0


@dataclass(slots=True)
class Scores:
    """A sequence whose logits are wanted instead of tokens: rows [first, first + len(out)) of its prompt."""

    request_id: int
    first: int
    out: F32
    usage: Usage
    index: int = field(default=0, init=False)


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
        self._live: dict[int, Choice | Scores] = {}  # by sequence id
        self._sequences: dict[int, int] = {}  # request id -> sequence id (one choice a request)
        self._deadlines = Deadlines()
        self._pending: list[Event] = []
        self._next_id = 1
        self._steps = 0
        self._last_step = clock()
        self._counts = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "finished": 0}

    # --- arrival and departure -----------------------------------------------------------------------------------

    def add(self, request: Request, max_new: int) -> int:
        """Queue a prepared request (token ids, seed fixed). Raises what Scheduler.add raises."""
        tokens = prompt_tokens(request)
        usage = Usage(prompt_tokens=len(tokens))
        request_id = self._next_id
        top = request.params.prompt_logprobs
        if max_new == 0 and top is None:
            self._scheduler.check(len(tokens), 0)
            self._pending.append(Event(request_id, finish_reason="length", usage=usage, timing=Timing()))
        else:
            params = request.params
            scores = None if top is None else PromptScores(tokens, top)
            choice = Choice(
                request_id, params, TokenSampler(params), self._tokenizer.stream(params.stop), max_new, usage, scores
            )
            seq = self._scheduler.add(
                tokens,
                max_new,
                logits_from=-1 if scores is None else 0,
                extras=_extras(params),
                priority=request.priority,
                client=request.client,
            )
            self._live[seq] = choice
            self._sequences[request_id] = seq
            self._deadlines.add(seq, self._clock(), request.queue_ms, request.deadline_ms)
        self._next_id += 1
        return request_id

    def score(self, tokens: NDArray[np.int32], first: int, out: F32) -> int:
        """Fill out [len(tokens) - first, vocab] with the logits of tokens[first:]; ends like a request."""
        seq = self._scheduler.add(tokens, 0, logits_from=first)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._live[seq] = Scores(request_id, first, out, Usage(prompt_tokens=len(tokens)))
        self._sequences[request_id] = seq
        return request_id

    def abort(self, request_id: int) -> bool:
        """Cancel; blocks are free at once, the event comes with the next step. False when it is not live."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._pending.append(self._end(seq, "cancelled"))
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

    @property
    def n_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._scheduler.n_waiting

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do or to tell."""
        return bool(self._live or self._pending)

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one batch step; at most one event for each live choice. [] when there is nothing to do."""
        events, self._pending = self._pending, []
        for seq, waiting in self._deadlines.due(self._clock()):
            if not waiting or self._scheduler.times(seq)[1] is None:
                events.append(self._end(seq, "deadline"))
        ended: list[int] = []  # told so already, still held by the scheduler
        try:
            view = self._scheduler.plan()
            if view is not None:
                began = self._clock()
                logits = self._executor.forward(view)
                sampled = self._read_rows(view, logits, events, ended)
                self._scheduler.commit(sampled, max(0.0, self._clock() - began))
                while ended:
                    self._scheduler.finish(ended.pop())
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

    def _read_rows(self, view: BatchView, logits: F32, events: list[Event], ended: list[int]) -> NDArray[np.int32]:
        """Turn logits rows into events; returns the token for each row, -1 for none, and notes who ended."""
        sampled = np.full(view.n_rows, -1, np.int32)
        at = 0
        for row, (seq, (_, first, n_tok, n_log)) in enumerate(zip(self._scheduler.planned(), view.rows(), strict=True)):
            if n_log == 0:
                continue
            at += n_log
            live = self._live[seq]
            if isinstance(live, Scores):
                done = self._take_scores(live, first + n_tok - n_log, logits[at - n_log : at])
                event = self._forget(seq, "length") if done else None
            elif live.scores is not None:
                event, sampled[row] = self._take_prompt(seq, live, live.scores, logits[:at], n_log, first + n_tok)
            else:
                event, sampled[row] = self._take_token(seq, live, logits, at - 1, first + n_tok)
            if event is not None:
                events.append(event)
                if event.finish_reason is not None:
                    sampled[row] = -1
                    if event.error is None:
                        ended.append(seq)
                    else:  # before the commit: others must not find what this step computed
                        self._scheduler.finish(seq)
        return sampled

    def _take_scores(self, scores: Scores, position: int, rows: F32) -> bool:
        at = position - scores.first
        scores.out[at : at + len(rows)] = rows
        return at + len(rows) == len(scores.out)

    def _take_prompt(
        self, seq: int, choice: Choice, scores: PromptScores, logits: F32, n_rows: int, position: int
    ) -> tuple[Event | None, int]:
        """Score prompt tokens with the last n_rows logits rows; the row after the prompt gives its first token, too."""
        failed = scores.take(logits[-n_rows:])
        if failed is not None:
            return self._not_finite(seq, failed), -1
        if not scores.done:
            return None, -1
        choice.scores = None
        if choice.max_new == 0:
            return self._forget(seq, "length", prompt_logprobs=scores.entries), -1
        event, token = self._take_token(seq, choice, logits, len(logits) - 1, position)
        event.prompt_logprobs = scores.entries
        return event, token

    def _take_token(self, seq: int, choice: Choice, logits: F32, row: int, position: int) -> tuple[Event, int]:
        """Pick the token for `position` from a logits row; returns its event, the last one if it ends the choice."""
        token = choice.sampler.pick(logits, row, position)
        if token < 0:
            return self._not_finite(seq, position), -1
        choice.usage.completion_tokens += 1
        self._counts["generated_tokens"] += 1
        logprobs = None
        if choice.params.logprobs is not None:
            logprobs = [TokenLogprob(*choice.sampler.logprob(logits, row, token))]
        text, reason, stop = self._advance_text(choice, token)
        if reason is None:
            return Event(choice.request_id, choice.index, text, (token,), logprobs), token
        event = self._forget(seq, reason, stop=stop)
        event.text, event.tokens, event.logprobs = text, (token,), logprobs
        return event, token

    def _advance_text(self, choice: Choice, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Text that is now safe to send, and whether and why the choice ends with this token."""
        params = choice.params
        if token in params.stop_token_ids:
            return choice.stream.finish(), "stop", token
        if not params.ignore_eos and token in self._tokenizer.eos_ids:
            return choice.stream.finish(), "stop", None
        text, stop = choice.stream.push(token)
        if stop is not None:
            return text, "stop", stop
        if choice.usage.completion_tokens == choice.max_new:
            return text + choice.stream.finish(), "length", None
        return text, None, None

    # --- the end of a request ------------------------------------------------------------------------------------

    def _forget(self, seq: int, reason: FinishReason, **more: Any) -> Event:
        """The terminal event of a sequence; the scheduler still holds it."""
        live = self._live.pop(seq)
        self._deadlines.forget(seq)
        del self._sequences[live.request_id]
        self._counts["finished"] += 1
        self._counts["prompt_tokens"] += live.usage.prompt_tokens
        live.usage.cached_tokens = self._scheduler.cached_tokens(seq)
        self._counts["cached_tokens"] += live.usage.cached_tokens
        timing = self._timing(seq)
        return Event(live.request_id, live.index, finish_reason=reason, usage=live.usage, timing=timing, **more)

    def _end(self, seq: int, reason: FinishReason, **more: Any) -> Event:
        event = self._forget(seq, reason, **more)
        self._scheduler.finish(seq)
        return event

    def _not_finite(self, seq: int, position: int) -> Event:
        error = NonFinite(f"the model gave no finite logits at position {position}")
        return self._forget(seq, "error", error=error)

    def _fail_all(self, error: Exception) -> list[Event]:
        reason = error if isinstance(error, MiroError) else InternalError(f"the engine failed: {error}")
        return [self._end(seq, "error", error=reason) for seq in list(self._live)]

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
            "preemptions": self._scheduler.preemptions,
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
