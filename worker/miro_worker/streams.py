"""One live request as its client sees it: what is to be sent and how it ends."""

from __future__ import annotations

from collections.abc import Callable

from miro_client import wire
from miro_client.errors import MiroError
from miro_cy.requests import Event
from miro_worker.jobs import Job
from miro_worker.output import TOKEN_BYTES, Output, logprob_bytes
from miro_worker.sockets import Peer


class Stream:
    """The choices of a request, and what is to be sent of them. Owned by the I/O thread.

    A streamed request's output goes into CHUNKs, each with whatever has come together by then of one choice; that of
    one that is not streamed goes whole into the ENDs. Log-probabilities of the prompt wait for the END of choice 0 in
    any case; how much that may be is checked before the engine takes the request.

    waiting: choices that have something to send, in the order in which they came to have it.
    unsent_bytes: what waits in memory; of a request that is not streamed, all of its answer so far.
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
        self.closed = False  # its last END or its ERROR was handed over
        self.unsent_bytes = 0
        self.waiting: dict[int, Output] = {}
        self._outputs = [Output(i) for i in range(job.choices)]
        self._n_open = self._n_undecided = job.choices
        self._prompt_logprobs: list[wire.Logprob | None] | None = None

    @property
    def decided(self) -> bool:
        """Whether it is settled how every choice ends."""
        return self._n_undecided == 0

    def absorb(self, event: Event, fingerprint: str) -> None:
        """Add what a step did for a choice."""
        output = self._outputs[event.choice]
        if output.end is not None:
            return
        self.unsent_bytes += output.absorb(event)
        if event.prompt_logprobs is not None:
            # As they are: to go through a hundred thousand pairs would hold up everybody else's messages.
            self._prompt_logprobs = [*event.prompt_logprobs]
            if not self.streamed:
                self.unsent_bytes += sum(logprob_bytes(1, len(entry.top)) for entry in event.prompt_logprobs if entry)
        if event.finish_reason is not None:
            self._decide(output, self._end_of(event, output.index, fingerprint))
            if not self.streamed:
                output.put_whole()
        if output.end is not None or (self.streamed and output.has_pieces):
            self.waiting[output.index] = output

    def end_with(self, make_end: Callable[[int], wire.End]) -> None:
        """Drop what waits and end every choice that is open so."""
        self.waiting = {}
        for output in self._outputs:
            if not output.closed:
                self.drop_pieces(output)
                self._decide(output, make_end(output.index))
                self.waiting[output.index] = output

    def cancel_decided(self) -> None:
        """Of choices whose end is decided nothing but that end shall be sent."""
        for output in self.waiting.values():
            if output.end is not None and output.has_pieces:
                self.cut(output)

    def cut(self, output: Output) -> None:
        """Drop what a choice has, because the client has cancelled and takes no more."""
        self.unsent_bytes -= output.unsent_bytes
        output.cut()

    def drop_pieces(self, output: Output) -> None:
        self.unsent_bytes -= output.unsent_bytes
        output.drop_pieces()

    def chunk_sent(self, output: Output) -> None:
        self.sequence += 1
        if self.credit is not None:
            self.credit -= 1
        self.drop_pieces(output)

    def end_of(self, output: Output) -> wire.End | None:
        """The END of a choice, as it is to be sent next; None while that is not decided."""
        if output.end is not None:
            output.end.more = self._n_open > 1
        return output.end

    def close(self, output: Output) -> None:
        """Nothing waits of this choice; if it has an END, that is on its way, and there is no other."""
        del self.waiting[output.index]
        if output.end is not None:
            output.closed = True
            self._n_open -= 1
            if self._n_open == 0:
                self.close_all()

    def close_all(self) -> None:
        """The last reply is on its way; there is no other."""
        self.closed = True
        self.peer.finish(self.id)

    def accepted(self, fingerprint: str) -> wire.Accepted:
        position = len(self.prompt_ids) // TOKEN_BYTES
        return wire.Accepted(tokens=self.prompt_ids, seed=self.seed, position=position, fingerprint=fingerprint)

    def failed_end(self, error: MiroError) -> Callable[[int], wire.End]:
        """The END of each choice of a request that the worker gives up."""
        usage, timing = self._usage_so_far(), wire.Timing(queue_ms=self.waited_ms)
        message = wire.plain(error.message)
        return lambda i: wire.End(i=i, reason="error", code=error.code, message=message, usage=usage, timing=timing)

    def cancelled_end(self) -> Callable[[int], wire.End]:
        """The END of each choice of a request that was cancelled before the engine knew it."""
        usage = self._usage_so_far()
        return lambda i: wire.End(i=i, reason="cancelled", usage=usage, timing=wire.Timing())

    def _decide(self, output: Output, end: wire.End) -> None:
        self._n_undecided -= output.end is None
        output.decide(end)

    def _end_of(self, event: Event, index: int, fingerprint: str) -> wire.End:
        """The END of a choice that the engine finished."""
        usage, timing, error = event.usage, event.timing, event.error
        end = wire.End(
            i=index,
            reason=str(event.finish_reason),
            code=None if error is None else error.code,
            message=None if error is None else wire.plain(error.message),
            stop=event.stop,
            score=event.score,
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
        )
        if index == 0:
            end.plp, self._prompt_logprobs = self._prompt_logprobs if error is None else None, None
            if not self.streamed:
                end.tokens, end.seed, end.fingerprint = self.prompt_ids, self.seed, fingerprint
        return end

    def _usage_so_far(self) -> wire.Usage:
        return wire.Usage(prompt=len(self.prompt_ids) // TOKEN_BYTES)
