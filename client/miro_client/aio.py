"""The client for asyncio: AsyncClient does what Client does, and waits in the event loop instead of a thread.

Replies come from the connection's thread, which wakes the loop of the task that waits, if one does. Nothing else ties a
client to a loop: it may outlive one and serve another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from miro_client import wire
from miro_client.answer import Answer
from miro_client.base import CONTROL_S, HELLO, Body, ClientBase, check_timeout, drain_body, expect, generate_body
from miro_client.call import Call, Entry, Inbox
from miro_client.connection import Connection
from miro_client.errors import MiroError, RequestTimeout
from miro_client.results import Chunk, Result


class AsyncClient(ClientBase):
    """A connection to a worker, for asyncio: `async with AsyncClient() as client: ...`.

    endpoint: where the worker listens; None means `miro_client.default_endpoint()`.
    timeout: seconds to wait for the next piece of an answer; None waits as long as the worker lives. A worker that
    cannot be reached, goes away or falls silent raises ConnectionLost in either case.

    Any number of tasks may use it at once, in any event loop. Cancelling a task cancels the request that it waits for.
    After a fork, make a new one. Close it, or use it as a context manager; what is still running is then cancelled.
    """

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncGeneration:
        """Start a request and stream its answer: `async for chunk in client.generate("...", max_tokens=64): ...`.

        Arguments and errors are those of `Client.generate`. Leaving the loop early does not end the request while
        something still holds the iterator: `async with client.generate(...) as stream` does, and so does `aclose`.
        """
        return self._start(prompt, tokens, messages, timeout, sampling, stream=True)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Result:
        """The whole answer in one piece; arguments and errors as for `generate`."""
        async with self._start(prompt, tokens, messages, timeout, sampling, stream=False) as generation:
            async for _ in generation:
                pass
            return generation.result

    async def ping(self, timeout: float | None = CONTROL_S) -> wire.Pong:
        """The worker's state: epoch, running, waiting, free_blocks, last_step_age_ms, live."""
        return await self._ask(wire.Ping(), wire.Pong, timeout)

    async def hello(self, timeout: float | None = CONTROL_S) -> wire.Welcome:
        """What the worker is: model, context, limits, version, fingerprint."""
        return await self._ask(HELLO, wire.Welcome, timeout)

    async def stats(self, timeout: float | None = CONTROL_S) -> wire.StatsReply:
        """Counters since the worker's start, and gauges; answered whatever it is busy with."""
        return await self._ask(wire.Stats(), wire.StatsReply, timeout)

    async def health(self, timeout: float | None = CONTROL_S) -> wire.HealthReply:
        """Whether the worker is ready, and if not, why: starting, stalled, draining or failed."""
        return await self._ask(wire.Health(), wire.HealthReply, timeout)

    async def models(self, timeout: float | None = CONTROL_S) -> list[wire.ModelInfo]:
        """What the worker serves: names, contexts, sizes, settings."""
        return (await self._ask(wire.Models(), wire.ModelsReply, timeout)).models

    async def drain(self, grace_ms: int | None = None, timeout: float | None = CONTROL_S) -> int:
        """Make the worker finish what runs, take nothing new and end. Returns how many requests may still finish.

        grace_ms: how long they may take; None leaves it to the worker. Raises BadField.
        """
        body = drain_body(grace_ms)
        return (await self._ask(body, wire.DrainReply, timeout)).live

    async def aclose(self) -> None:
        """Cancel what runs and close. Returns within two seconds; idempotent."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _start(
        self,
        prompt: str | None,
        tokens: Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        timeout: float | None,
        sampling: dict[str, Any],
        *,
        stream: bool,
    ) -> AsyncGeneration:
        wait_s = self._wait_s(timeout)
        inbox = LoopInbox()
        call = Call(generate_body(prompt, tokens, messages, sampling, stream=stream), inbox)
        self._connection.start(call)
        return AsyncGeneration(self, self._connection, call, inbox, wait_s)

    async def _ask(self, body: wire.Request, kind: type[Body], timeout: float | None) -> Body:
        wait_s = check_timeout(timeout)
        inbox = LoopInbox()
        call = Call(body, inbox)
        connection = self._connection_for(body)
        connection.start(call)
        try:
            return expect(await inbox.take(wait_s), kind)
        except BaseException:
            connection.cancel(call)
            raise


class AsyncGeneration(Answer, AsyncIterator[Chunk]):
    """The answer to one request, as it comes. One task at a time may iterate it.

    prompt_tokens and seed are known once iteration has begun; `result` after it has ended.
    """

    def __init__(
        self, client: AsyncClient, connection: Connection, call: Call, inbox: LoopInbox, timeout: float | None
    ) -> None:
        super().__init__(client, connection, call, timeout)
        self._inbox = inbox

    async def __anext__(self) -> Chunk:
        if self._inbox.awaited:
            raise MiroError("another task waits for the next piece of this answer already")
        while not self._done:
            try:
                self._connection.check_process()
                chunk = self._receive(await self._inbox.take(self._timeout))
            except BaseException:
                # A timeout, a cancelled task, a lost chunk: nobody will read the rest.
                self.close()
                raise
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; whoever waits for more gets its end. Idempotent."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LoopInbox(Inbox):
    """For a task of an event loop. What comes while nobody waits costs the loop nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: deque[Entry] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def awaited(self) -> bool:
        return self._waiter is not None

    def _push(self, entry: Entry) -> None:
        self._entries.append(entry)
        waiter = self._waiter
        if waiter is not None:
            with contextlib.suppress(RuntimeError):  # its loop has been closed: nobody waits any more
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def take(self, timeout: float | None) -> wire.Reply | None:
        """The next reply. Raises RequestTimeout, or what the connection says."""
        if not self._entries:
            await self._wait(timeout)
        return self._unpack(self._entries.popleft())

    async def _wait(self, timeout: float | None) -> None:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            # Looked at again: what came before the waiter was set has woken nobody.
            if not self._entries:
                async with asyncio.timeout(timeout):
                    await waiter
        except TimeoutError:
            raise RequestTimeout(f"no answer within {timeout:g} s") from None
        finally:
            self._waiter = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
