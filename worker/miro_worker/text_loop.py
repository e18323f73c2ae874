"""The text thread: chat template and tokenising, so that a long prompt delays neither the sockets nor the steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from miro_client.errors import InternalError, MiroError, RequestError, TooLarge
from miro_client.wire import pack_ids, unpack_ids
from miro_cy.requests import Request
from miro_cy.sampling.params import SamplingParams
from miro_worker.conversation import unpack_messages
from miro_worker.jobs import Abort, Failed, Job, Outcome, Prepared
from miro_worker.mailbox import Mailbox
from miro_worker.output import TOKEN_BYTES, logprob_bytes

log = logging.getLogger("miro.worker")


class Preparer(Protocol):
    """The part of the engine that this thread calls."""

    def prepare(self, prompt: str | Mapping[str, Any], params: SamplingParams) -> Request: ...


def as_request_error(error: Exception, doing: str) -> RequestError:
    """What the client is told. Details of an unexpected error stay in the log."""
    if isinstance(error, RequestError):
        return error
    log.error("%s failed", doing, exc_info=error)
    return InternalError(error.message if isinstance(error, MiroError) else f"{doing} failed")


class TextLoop:
    """Takes jobs in order, hands prepared ones to the step thread and errors to the I/O thread.

    max_reply_bytes: what the log-probabilities of a prompt may come to.
    """

    def __init__(
        self,
        engine: Preparer,
        inbox: Mailbox[Job],
        steps: Mailbox[Prepared | Abort],
        outcomes: Mailbox[Outcome],
        max_reply_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._steps = steps
        self._outcomes = outcomes
        self._max_reply_bytes = max_reply_bytes
        self._clock = clock
        self._began: float | None = None

    def busy_ms(self) -> float:
        """Milliseconds spent so far on the prompt in hand; 0 when there is none. Any thread."""
        began = self._began
        return 0.0 if began is None else max(0.0, self._clock() - began) * 1e3

    def run(self) -> None:
        while (jobs := self._inbox.take(wait=True, most=1)) is not None:
            for job in jobs:
                self._began = self._clock()
                self._prepare(job)
                self._began = None

    def _prepare(self, job: Job) -> None:
        prompt = job.prompt  # read once: the I/O thread clears it on cancel
        if prompt is None or job.cancelled:
            return
        try:
            if isinstance(prompt, Mapping) and "tokens" in prompt:
                prompt = {"tokens": unpack_ids(prompt["tokens"])}
            elif isinstance(prompt, Mapping):
                prompt = {"messages": unpack_messages(prompt["messages"])}
            request = self._engine.prepare(prompt, job.params)
            assert isinstance(request.prompt, Mapping)
            prepared = Prepared(job, request, pack_ids(request.prompt["tokens"]))
            self._check_scores(prepared)
        except Exception as error:
            self._outcomes.put([Failed(job, as_request_error(error, "preparing the prompt"))])
            return
        self._steps.put([prepared])

    def _check_scores(self, prepared: Prepared) -> None:
        """Refuse a prompt whose log-probabilities no END could hold, before it is computed. Raises TooLarge."""
        top = prepared.job.params.prompt_logprobs
        n_prompt = len(prepared.tokens) // TOKEN_BYTES
        if top is None or logprob_bytes(n_prompt, top) <= self._max_reply_bytes:
            return
        raise TooLarge(
            f"the log-probabilities of {n_prompt} prompt tokens with {top} alternatives each count "
            f"{logprob_bytes(n_prompt, top)} bytes, an answer holds {self._max_reply_bytes}",
            field="prompt_logprobs",
        )
