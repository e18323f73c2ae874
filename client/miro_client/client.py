"""The client: `Client.generate` streams, `Client.complete` waits for the whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from miro_client import wire
from miro_client.answer import Answer
from miro_client.base import CONTROL_S, HELLO, Body, ClientBase, check_timeout, drain_body, expect, generate_body
from miro_client.call import Call, ThreadInbox
from miro_client.connection import Connection
from miro_client.results import Chunk, Result


class Client(ClientBase):
    """A connection to a worker.

    endpoint: where the worker listens; None means `miro_client.default_endpoint()`.
    timeout: seconds to wait for the next piece of an answer; None waits as long as the worker lives. A worker that
    cannot be reached, goes away or falls silent raises ConnectionLost in either case.

    May be used by several threads at once, and several `generate` iterators may run side by side. After a fork, make a
    new one. Close it, or use it as a context manager; what is still running is then cancelled.
    """

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
        sampling: the fields of `miro_cy.SamplingParams` (max_tokens, temperature, top_k, top_p, seed, stop, n, ...),
        and priority (-100 to 100), queue_ms and deadline_ms: the answer ends with finish_reason "deadline" unless it
        has begun, or ended, within so many milliseconds. With n above 1 each chunk names its choice, and
        `result.choices` holds all answers.
        timeout: overrides the client's. Closing or dropping the iterator cancels the request.

        Raises BadField or TooLarge here; iterating raises the worker's refusal as one of `miro_client.errors`,
        RequestTimeout, or ConnectionLost. So does it, as SlowClient, when over 16 MiB of the answer wait to be taken.
        """
        return self._start(prompt, tokens, messages, timeout, sampling, stream=True)

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
        with self._start(prompt, tokens, messages, timeout, sampling, stream=False) as generation:
            for _ in generation:
                pass
            return generation.result

    def ping(self, timeout: float | None = CONTROL_S) -> wire.Pong:
        """The worker's state: epoch, running, waiting, free_blocks, last_step_age_ms, live."""
        return self._ask(wire.Ping(), wire.Pong, timeout)

    def hello(self, timeout: float | None = CONTROL_S) -> wire.Welcome:
        """What the worker is: model, context, limits, version, fingerprint."""
        return self._ask(HELLO, wire.Welcome, timeout)

    def stats(self, timeout: float | None = CONTROL_S) -> wire.StatsReply:
        """Counters since the worker's start, and gauges; answered whatever it is busy with."""
        return self._ask(wire.Stats(), wire.StatsReply, timeout)

    def health(self, timeout: float | None = CONTROL_S) -> wire.HealthReply:
        """Whether the worker is ready, and if not, why: starting, stalled, draining or failed."""
        return self._ask(wire.Health(), wire.HealthReply, timeout)

    def models(self, timeout: float | None = CONTROL_S) -> list[wire.ModelInfo]:
        """What the worker serves: names, contexts, sizes, settings."""
        return self._ask(wire.Models(), wire.ModelsReply, timeout).models

    def drain(self, grace_ms: int | None = None, timeout: float | None = CONTROL_S) -> int:
        """Make the worker finish what runs, take nothing new and end. Returns how many requests may still finish.

        grace_ms: how long they may take; None leaves it to the worker. Raises BadField.
        """
        body = drain_body(grace_ms)
        return self._ask(body, wire.DrainReply, timeout).live

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
        timeout: float | None,
        sampling: dict[str, Any],
        *,
        stream: bool,
    ) -> Generation:
        wait_s = self._wait_s(timeout)
        inbox = ThreadInbox()
        call = Call(generate_body(prompt, tokens, messages, sampling, stream=stream), inbox)
        self._connection.start(call)
        return Generation(self, self._connection, call, inbox, wait_s)

    def _ask(self, body: wire.Request, kind: type[Body], timeout: float | None) -> Body:
        wait_s = check_timeout(timeout)
        inbox = ThreadInbox()
        call = Call(body, inbox)
        connection = self._connection_for(body)
        connection.start(call)
        try:
            return expect(inbox.take(wait_s), kind)
        except BaseException:
            connection.cancel(call)
            raise


class Generation(Answer, Iterator[Chunk]):
    """The answer to one request, as it comes. One thread at a time may iterate it.

    prompt_tokens and seed are known once iteration has begun; `result` after it has ended.
    """

    def __init__(
        self, client: Client, connection: Connection, call: Call, inbox: ThreadInbox, timeout: float | None
    ) -> None:
        super().__init__(client, connection, call, timeout)
        self._inbox = inbox

    def __next__(self) -> Chunk:
        while not self._done:
            try:
                self._connection.check_process()
                chunk = self._receive(self._inbox.take(self._timeout))
            except BaseException:
                # A timeout, Ctrl-C, a lost chunk: nobody will read the rest.
                self.close()
                raise
            if chunk is not None:
                return chunk
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
