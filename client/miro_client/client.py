"""The client: `Client.generate` streams, `Client.complete` waits for the whole answer."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from miro_client import __version__, wire
from miro_client.connection import Call, Connection
from miro_client.endpoint import check_endpoint, check_private, default_endpoint
from miro_client.errors import BadField, ConnectionLost, MiroError, RequestTimeout, TooLarge, from_wire
from miro_client.results import Chunk, Result, Timing, TokenLogprob, Usage

Body = TypeVar("Body", wire.Pong, wire.Welcome)
#: How long PING and HELLO wait unless told otherwise, in seconds.
CONTROL_S = 5.0


class Client:
    """A connection to a worker.

    endpoint: where the worker listens; None means `miro_client.default_endpoint()`.
    timeout: seconds to wait for the next piece of an answer; None waits as long as the worker lives. A worker that
    cannot be reached, goes away or falls silent raises ConnectionLost in either case.

    May be used by several threads at once, and several `generate` iterators may run side by side. After a fork, make a
    new one. Close it, or use it as a context manager; what is still running is then cancelled.
    """

    def __init__(self, endpoint: str | None = None, *, timeout: float | None = None) -> None:
        """Connects in the background. Raises ConfigError for an endpoint ZeroMQ cannot use, BadField for a timeout."""
        if endpoint is None:
            endpoint = default_endpoint()
            folder = Path(endpoint.removeprefix("ipc://")).parent
            if os.path.lexists(folder):
                check_private(folder)
        check_endpoint(endpoint)
        _check_timeout(timeout)
        self.endpoint = endpoint
        self.timeout = timeout
        self._connection = Connection(endpoint)
        # At exit too: the thread must not be inside ZeroMQ when the interpreter goes.
        self._finalizer = weakref.finalize(self, self._connection.close)

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Generation:
        """Start a request and stream its answer: `for chunk in client.generate("...", max_tokens=64): ...`.

        Exactly one of prompt, tokens and messages ([{"role", "content"}, ...], for the model's chat template, as
        `Engine` takes them: with tool_calls, say) is given.
        sampling: the fields of `miro_cy.SamplingParams` (max_tokens, temperature, top_k, top_p, seed, stop, ...).
        timeout: overrides the client's. Closing or dropping the iterator cancels the request.

        Raises BadField or TooLarge here; iterating raises the worker's refusal as one of `miro_client.errors`,
        RequestTimeout, or ConnectionLost.
        """
        _check_timeout(timeout)
        call = self._start(prompt, tokens, messages, sampling, stream=True)
        return Generation(self, call, self.timeout if timeout is None else timeout)

    def complete(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer in one piece; arguments and errors as for `generate`."""
        _check_timeout(timeout)
        call = self._start(prompt, tokens, messages, sampling, stream=False)
        with Generation(self, call, self.timeout if timeout is None else timeout) as generation:
            for _ in generation:
                pass
            return generation.result

    def ping(self, timeout: float | None = CONTROL_S) -> wire.Pong:
        """The worker's state: epoch, running, waiting, free_blocks, last_step_age_ms, live."""
        return self._ask(wire.Ping(), wire.Pong, timeout)

    def hello(self, timeout: float | None = CONTROL_S) -> wire.Welcome:
        """What the worker is: model, context, limits, version, fingerprint."""
        return self._ask(
            wire.Hello(minor=wire.MINOR, client=f"miro-client {__version__}", lang="python"), wire.Welcome, timeout
        )

    def close(self) -> None:
        """Cancel what runs and close. Returns within two seconds; idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(
        self,
        prompt: str | None,
        tokens: Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        sampling: dict[str, Any],
        *,
        stream: bool,
    ) -> Call:
        if sum(given is not None for given in (prompt, tokens, messages)) != 1:
            raise BadField("give exactly one of prompt, tokens and messages", field="prompt")
        try:
            body = wire.Generate(
                prompt=prompt,
                tokens=None if tokens is None else wire.pack_ids(tokens),
                messages=None if messages is None else [wire.ChatMessage(**message) for message in messages],
                sampling={name: _plain(value) for name, value in sampling.items()},
                stream=stream,
            )
            call = Call(body)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, MiroError):
                raise
            raise BadField(f"the request cannot be encoded: {error}") from None
        if len(call.frames[-1]) > wire.MAX_MESSAGE_BYTES:
            # ZeroMQ would answer by closing the connection.
            limit, size = wire.MAX_MESSAGE_BYTES, len(call.frames[-1])
            raise TooLarge(f"a request takes at most {limit} bytes, this one has {size}", field="prompt")
        self._connection.start(call)
        return call

    def _ask(self, body: wire.Request, kind: type[Body], timeout: float | None) -> Body:
        _check_timeout(timeout)
        call = Call(body)
        self._connection.start(call)
        reply = _next_reply(call, timeout)
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, wire.Error):
            raise _error_of(reply)
        raise ConnectionLost(f"the worker answered with {type(reply).__name__}")


class Generation(Iterator[Chunk]):
    """The answer to one request, as it comes. One thread at a time may iterate it.

    prompt_tokens and seed are known once iteration has begun; `result` after it has ended.
    """

    def __init__(self, client: Client, call: Call, timeout: float | None) -> None:
        self._client = client  # held, or a client that nothing else holds would close under its iterator
        self._call = call
        self._timeout = timeout
        self._done = False
        self._sequence = 0
        self._text: list[str] = []
        self._result = Result()
        self._finished = False
        self.prompt_tokens: list[int] = []
        self.seed: int | None = None

    def __next__(self) -> Chunk:
        while not self._done:
            try:
                self._client._connection.check_process()
                reply = _next_reply(self._call, self._timeout)
                if isinstance(reply, wire.Chunk):
                    return self._chunk(reply)
                if isinstance(reply, wire.Accepted):
                    self._accepted(reply.tokens, reply.seed, reply.fingerprint)
                elif isinstance(reply, wire.End):
                    last = self._end(reply)
                    if last is not None:
                        return last
                elif isinstance(reply, wire.Error):
                    self._done = True
                    raise _error_of(reply)
            except BaseException:
                # A timeout, Ctrl-C, a lost chunk: nobody will read the rest.
                self.close()
                raise
        raise StopIteration

    @property
    def result(self) -> Result:
        """The whole answer. Raises ConnectionLost if the iteration has not come to its end."""
        if not self._finished:
            raise ConnectionLost("the answer is not complete: it was closed, or not read to its end")
        return self._result

    def close(self) -> None:
        """Cancel the request unless it has ended. Returns at once; idempotent."""
        if not self._done:
            self._done = True
            self._client._connection.cancel(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_done", True) is False:
            self.close()

    def _accepted(self, tokens: bytes, seed: int, fingerprint: str) -> None:
        self.prompt_tokens = self._result.prompt_tokens = wire.unpack_ids(tokens)
        self.seed = self._result.seed = seed
        self._result.fingerprint = fingerprint

    def _chunk(self, reply: wire.Chunk) -> Chunk:
        if reply.s != self._sequence:
            raise ConnectionLost(f"chunk {self._sequence} of the answer was lost")
        self._sequence += 1
        return self._piece(reply.t, reply.k, reply.lp, reply.i)

    def _piece(self, text: str, tokens: bytes, logprobs: list[wire.Logprob] | None, choice: int) -> Chunk:
        entries = None if logprobs is None else [TokenLogprob(value, list(top)) for value, top in logprobs]
        chunk = Chunk(text, wire.unpack_ids(tokens), entries, choice)
        self._text.append(text)
        self._result.tokens += chunk.tokens
        if entries is not None:
            self._result.logprobs = (self._result.logprobs or []) + entries
        return chunk

    def _end(self, end: wire.End) -> Chunk | None:
        """Take the END; the answer itself, if it was not streamed."""
        self._done = True
        if end.reason == "error":
            raise from_wire(end.code or "internal", end.message or "the request failed")
        last = None
        if end.t is not None or end.k is not None:
            last = self._piece(end.t or "", end.k or b"", end.lp, end.i)
        if end.tokens is not None and end.seed is not None:
            self._accepted(end.tokens, end.seed, end.fingerprint or "")
        result, usage, timing = self._result, end.usage, end.timing
        result.text = "".join(self._text)
        result.finish_reason = end.reason
        result.stop = end.stop
        result.usage = Usage(usage.prompt, usage.cached, usage.completion)
        result.timing = Timing(timing.queue_ms, timing.prefill_ms, timing.decode_ms)
        self._finished = True
        return last


def _check_timeout(timeout: float | None) -> None:
    """Raise BadField unless it is a number of seconds that can be waited for, or None."""
    if timeout is None:
        return
    if not isinstance(timeout, Real) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        limit = int(threading.TIMEOUT_MAX)
        raise BadField(f"timeout must be 0 to {limit} seconds or None, not {timeout!r:.80}", field="timeout")


def _next_reply(call: Call, timeout: float | None) -> wire.Reply:
    """The next message for this call. Raises RequestTimeout, or what the connection says."""
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        reply = call.replies.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise RequestTimeout(f"no answer within {timeout:g} s") from None
    if isinstance(reply, MiroError):
        raise reply
    return reply


def _error_of(reply: wire.Error) -> MiroError:
    return from_wire(reply.code, reply.message, field=reply.field, retry_after_ms=reply.retry_after_ms)


def _plain(value: Any) -> Any:
    """Values as the wire takes them: tuples become lists, what NumPy made becomes Python's own."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
