"""The answer to one request, put together from its replies: what the blocking and the asyncio iterator share."""

from __future__ import annotations

from dataclasses import replace

from miro_client import wire
from miro_client.call import Call
from miro_client.connection import Connection
from miro_client.errors import ConnectionLost, MiroError, from_wire
from miro_client.results import Chunk, Result, Timing, TokenLogprob, Usage


class Gathered:
    """The pieces of one choice, put together."""

    def __init__(self) -> None:
        self._result = Result()
        self._text: list[str] = []

    def add(self, chunk: Chunk) -> None:
        """The next piece."""
        self._text.append(chunk.text)
        self._result.tokens += chunk.tokens
        if chunk.logprobs is not None:
            self._result.logprobs = (self._result.logprobs or []) + chunk.logprobs

    def end(self, end: wire.End) -> None:
        """How it ended, after all pieces."""
        result, usage, timing = self._result, end.usage, end.timing
        if end.plp is not None:
            result.prompt_logprobs = [None if item is None else _entry(item) for item in end.plp]
        result.text = "".join(self._text)
        result.finish_reason = end.reason
        result.stop = end.stop
        result.score = end.score
        result.usage = Usage(usage.prompt, usage.cached, usage.completion)
        result.timing = Timing(timing.queue_ms, timing.prefill_ms, timing.decode_ms)

    def result(self, prompt_tokens: list[int], seed: int | None, fingerprint: str) -> Result:
        """What came of it; the arguments are those of the request."""
        return replace(self._result, prompt_tokens=prompt_tokens, seed=seed, fingerprint=fingerprint)


class Answer:
    """Base of Generation and AsyncGeneration, which wait for replies and hand them to `_receive`.

    prompt_tokens and seed are known once iteration has begun; `result` after it has ended.
    """

    def __init__(self, client: object, connection: Connection, call: Call, timeout: float | None) -> None:
        self._client = client  # held, or a client that nothing else holds would close under its iterator
        self._connection = connection
        self._call = call
        self._timeout = timeout
        self._done = False
        self._sequence = 0
        self._choices: dict[int, Gathered] = {}
        self._result: Result | None = None
        self._fingerprint = ""
        self.prompt_tokens: list[int] = []
        self.seed: int | None = None

    @property
    def result(self) -> Result:
        """The whole answer. Raises ConnectionLost if the iteration has not come to its end."""
        if self._result is None:
            raise ConnectionLost("the answer is not complete: it was closed, or not read to its end")
        return self._result

    def close(self) -> None:
        """Cancel the request unless it has ended; whoever waits for more gets its end. Returns at once; idempotent."""
        if not self._done:
            self._done = True
            self._connection.cancel(self._call)
            self._call.inbox.wake()

    def __del__(self) -> None:
        if getattr(self, "_done", True) is False:
            self.close()

    def _receive(self, reply: wire.Reply | None) -> Chunk | None:
        """Take in a reply; the piece of the answer that it brings, if any. Raises what it says went wrong."""
        if isinstance(reply, wire.Chunk):
            return self._chunk(reply)
        if isinstance(reply, wire.Accepted):
            self._accepted(reply.tokens, reply.seed, reply.fingerprint)
        elif isinstance(reply, wire.End):
            return self._end(reply)
        elif isinstance(reply, wire.Error):
            self._done = True
            raise error_of(reply)
        return None

    def _accepted(self, tokens: bytes, seed: int, fingerprint: str) -> None:
        self.prompt_tokens = wire.unpack_ids(tokens)
        self.seed, self._fingerprint = seed, fingerprint

    def _chunk(self, reply: wire.Chunk) -> Chunk:
        if reply.s != self._sequence:
            raise ConnectionLost(f"chunk {self._sequence} of the answer was lost")
        self._sequence += 1
        return self._piece(reply.t, reply.k, reply.lp, reply.i)

    def _piece(self, text: str, tokens: bytes, logprobs: list[wire.Logprob] | None, choice: int) -> Chunk:
        entries = None if logprobs is None else [_entry(item) for item in logprobs]
        chunk = Chunk(text, wire.unpack_ids(tokens), entries, choice)
        self._choices.setdefault(choice, Gathered()).add(chunk)
        return chunk

    def _end(self, end: wire.End) -> Chunk | None:
        """Take the END of a choice; the answer itself, if it was not streamed. One that failed fails the request."""
        self._done = not end.more
        if end.reason == "error":
            raise from_wire(end.code or "internal", end.message or "the request failed")
        last = None
        if end.t is not None or end.k is not None:
            last = self._piece(end.t or "", end.k or b"", end.lp, end.i)
        if end.tokens is not None and end.seed is not None:
            self._accepted(end.tokens, end.seed, end.fingerprint or "")
        self._choices.setdefault(end.i, Gathered()).end(end)
        if self._done:
            self._result = self._put_together()
        return last

    def _put_together(self) -> Result:
        of_request = (self.prompt_tokens, self.seed, self._fingerprint)
        choices = [self._choices[i].result(*of_request) for i in sorted(self._choices)]
        return replace(choices[0], choices=choices)


def _entry(item: wire.Logprob) -> TokenLogprob:
    return TokenLogprob(item[0], list(item[1]))


def error_of(reply: wire.Error) -> MiroError:
    return from_wire(reply.code, reply.message, field=reply.field, retry_after_ms=reply.retry_after_ms)
