"""One live request as its client sees it: what is to be sent and how it ends."""

from __future__ import annotations

from miro_client import wire
from miro_client.errors import MiroError
from miro_cy.requests import Event
from miro_worker.jobs import Job
from miro_worker.sockets import Peer

TOKEN_BYTES = 4
#: What a log-probability with its id takes in memory while it waits: a tuple of an int and a float, and its place.
LOGPROB_BYTES = 120


def logprob_bytes(n_tokens: int, top: int) -> int:
    """What the log-probabilities of so many tokens, with as many alternatives each, count."""
    return LOGPROB_BYTES * n_tokens * (1 + top)


class Stream:
    """Unsent output of a request, gathered until it may leave. Owned by the I/O thread.

    A streamed request's output goes into the next CHUNK, whatever has come together by then; that of one that is not
    streamed goes whole into its END. `end` is set once and is sent after everything else. Log-probabilities of the
    prompt wait for the END in any case; how much that may be is checked before the engine takes the request.
    """

    def __init__(self, job: Job, peer: Peer, request_id: bytes, body: wire.Generate, *, delimited: bool) -> None:
        self.job = job
        self.peer = peer
        self.id = request_id
        self.delimited = delimited
        self.streamed = body.stream
        self.credit = body.credit  # chunks that may still be sent; None: no window
        self.starved_since: float | None = None
        self.admitted = False
        self.aborted = False
        self.prompt_bytes = 0  # of a prompt that waits for the text thread
        self.prompt_ids = b""
        self.seed = 0
        self.waited_ms = 0.0
        self.sequence = 0
        self.end: wire.End | None = None
        self.closed = False  # its END or ERROR was handed over
        self.unsent_bytes = 0
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[wire.Logprob] | None = None
        self._prompt_logprobs: list[wire.Logprob | None] | None = None

    def absorb(self, event: Event) -> None:
        """Add what a step produced."""
        if event.text:
            self._text.append(event.text)
            self.unsent_bytes += len(event.text)
        self._tokens.extend(event.tokens)
        self.unsent_bytes += TOKEN_BYTES * len(event.tokens)
        if event.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            for entry in event.logprobs:
                top = [(int(token), float(value)) for token, value in entry.top]
                self._logprobs.append((float(entry.logprob), top))
                self.unsent_bytes += logprob_bytes(1, len(top))
        if event.prompt_logprobs is not None:
            # As they are: to go through a hundred thousand pairs would hold up everybody else's messages.
            self._prompt_logprobs = [*event.prompt_logprobs]
            if not self.streamed:
                self.unsent_bytes += sum(logprob_bytes(1, len(entry.top)) for entry in event.prompt_logprobs if entry)

    @property
    def has_output(self) -> bool:
        return bool(self._text or self._tokens)

    def close(self) -> None:
        """The terminal reply is on its way; there is no other."""
        self.closed = True
        self.peer.finish(self.id)

    def drop_output(self) -> None:
        self._text, self._tokens, self._logprobs = [], [], None
        self.unsent_bytes = 0

    def chunk(self) -> wire.Chunk:
        """What would leave now. Call `chunk_sent` if it did."""
        return wire.Chunk(
            s=self.sequence, t="".join(self._text), k=wire.pack_ids(self._tokens), lp=self._logprobs or None
        )

    def chunk_sent(self) -> None:
        self.sequence += 1
        if self.credit is not None:
            self.credit -= 1
        self.drop_output()

    def accepted(self, fingerprint: str) -> wire.Accepted:
        position = len(self.prompt_ids) // TOKEN_BYTES
        return wire.Accepted(tokens=self.prompt_ids, seed=self.seed, position=position, fingerprint=fingerprint)

    def make_end(self, event: Event, fingerprint: str) -> wire.End:
        """The END of a request that the engine finished."""
        usage, timing, error = event.usage, event.timing, event.error
        end = wire.End(
            reason=str(event.finish_reason),
            code=None if error is None else error.code,
            message=None if error is None else error.message,
            stop=event.stop,
            usage=self._usage_so_far()
            if usage is None
            else wire.Usage(prompt=usage.prompt_tokens, cached=usage.cached_tokens, completion=usage.completion_tokens),
            timing=wire.Timing(queue_ms=self.waited_ms)
            if timing is None
            else wire.Timing(
                # From receipt: the engine does not see the wait for the text thread.
                queue_ms=self.waited_ms + timing.queue_ms,
                prefill_ms=timing.prefill_ms,
                decode_ms=timing.decode_ms,
            ),
            plp=None if error is not None else self._prompt_logprobs,
        )
        if not self.streamed:
            end.t, end.k, end.lp = "".join(self._text), wire.pack_ids(self._tokens), self._logprobs
            end.tokens, end.seed, end.fingerprint = self.prompt_ids, self.seed, fingerprint
            self.drop_output()
        return end

    def failed_end(self, error: MiroError) -> wire.End:
        """The END of a request that the worker gives up."""
        usage, timing = self._usage_so_far(), wire.Timing(queue_ms=self.waited_ms)
        return wire.End(reason="error", code=error.code, message=error.message, usage=usage, timing=timing)

    def cancelled_end(self) -> wire.End:
        """The END of a request that was cancelled before the engine knew it."""
        return wire.End(reason="cancelled", usage=self._usage_so_far(), timing=wire.Timing())

    def _usage_so_far(self) -> wire.Usage:
        return wire.Usage(prompt=len(self.prompt_ids) // TOKEN_BYTES)
