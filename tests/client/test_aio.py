"""AsyncClient against a worker with a fake engine: answers, company, refusals, cancellation."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_engine import answer, ids_of
from raw_client import DEADLINE_S, wait_until

from miro_client import AsyncClient, Client, call
from miro_client.errors import (
    BadField,
    ConfigError,
    ConnectionLost,
    ContextOverflow,
    MiroError,
    QueueFull,
    RequestTimeout,
    SlowClient,
    TooLarge,
)
from miro_client.wire import MAX_MESSAGE_BYTES

LONG = 4000


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


async def eventually(condition: Any, what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


def test_a_stream_its_result_and_the_other_calls(worker, engine):
    async def work():
        async with AsyncClient(worker.endpoint) as client:
            stream = client.generate("hello", max_tokens=6, seed=5, logprobs=1, prompt_logprobs=1)
            with pytest.raises(ConnectionLost):
                _ = stream.result
            chunks = [chunk async for chunk in stream]
            assert [chunk async for chunk in stream] == []
            whole = await client.complete(messages=[{"role": "user", "content": "x"}], max_tokens=2)
            assert whole.prompt_tokens == ids_of("user:x\n")
            pong, welcome = await client.ping(), await client.hello()
            assert (welcome.model, welcome.epoch, pong.running) == ("fake", pong.epoch, 0)
            return chunks, stream

    chunks, stream = run(work())
    text, tokens = answer(ids_of("hello"), 6)
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token for chunk in chunks for token in chunk.tokens] == tokens
    assert (stream.prompt_tokens, stream.seed) == (ids_of("hello"), 5)
    with Client(worker.endpoint) as client:
        blocking = client.complete("hello", max_tokens=6, seed=5, logprobs=1, prompt_logprobs=1)
    assert len(blocking.prompt_logprobs) == 5
    blocking.timing = blocking.choices[0].timing = stream.result.timing
    assert blocking == stream.result


def test_many_streams_side_by_side(worker, engine):
    engine.step_seconds = 0.001

    async def one(client, number):
        text = ""
        async for chunk in client.generate(f"s{number}", max_tokens=20 + number):
            text += chunk.text
        return text

    async def work():
        before = threading.active_count()
        async with AsyncClient(worker.endpoint) as client:
            tasks = [asyncio.create_task(one(client, number)) for number in range(40)]
            await client.ping()
            assert threading.active_count() <= before + 1  # the connection's, however many requests there are
            return await asyncio.gather(*tasks)

    assert run(work()) == [answer(ids_of(f"s{i}"), 20 + i)[0] for i in range(40)]


@pytest.mark.parametrize("end", ["task", "with", "aclose", "close", "drop", "cycle", "timeout", "client"])
def test_an_abandoned_stream_cancels(worker, engine, end):
    engine.step_seconds = 0.002

    async def leave(client):
        stream = client.generate("abc", max_tokens=LONG)
        await anext(stream)
        assert engine.has_work
        if end == "task":
            task = asyncio.create_task(drain(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif end == "with":
            async with stream:
                async for _ in stream:
                    break
        elif end in ("aclose", "close"):
            await stream.aclose() if end == "aclose" else stream.close()
            await stream.aclose()
            assert await anext(stream, None) is None
        elif end == "cycle":
            loop = [stream]
            loop.append(loop)
            del stream, loop
            gc.collect()
        elif end == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await drain(stream)
        elif end == "client":
            await client.aclose()
            with pytest.raises(ConnectionLost):
                await drain(stream)

    async def work():
        async with AsyncClient(worker.endpoint) as client:
            await leave(client)
            await eventually(lambda: not engine.has_work, "the worker stopped")
            if end != "client":
                assert (await client.complete("x", max_tokens=1)).finish_reason == "length"

    run(work())


async def drain(stream):
    async for _ in stream:
        pass


def test_a_cancelled_wait_for_the_whole_answer_cancels(worker, engine):
    engine.gate.clear()

    async def work():
        async with AsyncClient(worker.endpoint) as client:
            task = asyncio.create_task(client.complete("abc", max_tokens=LONG))
            await eventually(lambda: engine.has_work, "the request is there")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.gate.set()
            await eventually(lambda: not engine.has_work, "it was cancelled")

    run(work())


def test_a_stream_that_is_never_consumed(worker, engine, monkeypatch):
    monkeypatch.setattr(call, "MAX_WAITING_BYTES", 50 * call.OVERHEAD_BYTES)
    engine.step_seconds = 0.001

    async def work():
        async with AsyncClient(worker.endpoint) as client:
            stream = client.generate("abc", max_tokens=LONG)
            await eventually(lambda: engine.has_work, "it has begun")
            await eventually(lambda: not engine.has_work, "it was cancelled at its limit")
            with pytest.raises(SlowClient):
                await drain(stream)
            client.generate("abc", max_tokens=LONG)
            await client.ping()
            await eventually(lambda: not engine.has_work, "what was dropped was cancelled")

    run(work())
    assert len(engine.added) <= 2


def test_timeouts(worker, engine):
    engine.gate.clear()

    async def work():
        async with AsyncClient(worker.endpoint, timeout=0.05) as client:
            for request in (client.complete("abc"), drain(client.generate("abc")), anext(client.generate("abc"))):
                with pytest.raises(RequestTimeout):
                    await request
            with pytest.raises(RequestTimeout):
                await client.complete("abc", timeout=0)
            engine.gate.set()
            await eventually(lambda: not engine.has_work, "all were cancelled")
            assert (await client.complete("abc", max_tokens=1, timeout=DEADLINE_S)).finish_reason == "length"
            for call_ in (client.ping, client.hello, lambda t: client.complete("a", timeout=t)):
                with pytest.raises(BadField) as caught:
                    await call_(-1)
                assert caught.value.field == "timeout"

    run(work())


def test_refusals_are_typed(worker, engine):
    async def work():
        async with AsyncClient(worker.endpoint) as client:
            with pytest.raises(ContextOverflow) as overflow:
                await client.complete("abc", max_tokens=5000)
            assert overflow.value.field == "max_tokens"
            engine.add_errors.append(QueueFull("full", retry_after_ms=77))
            with pytest.raises(QueueFull) as full:
                await anext(client.generate("abc"))
            assert full.value.retry_after_ms == 77
            for arguments in ({}, {"prompt": "a", "tokens": [1]}, {"tokens": [2**40]}, {"prompt": "\ud800"}):
                with pytest.raises(BadField):
                    client.generate(**arguments)
            with pytest.raises(TooLarge):
                client.generate("a" * MAX_MESSAGE_BYTES)
            assert (await client.complete("abc", max_tokens=1)).finish_reason == "length"

    run(work())
    with pytest.raises(ConfigError):
        AsyncClient("nonsense")


def test_one_task_at_a_time_iterates(worker, engine):
    engine.gate.clear()

    async def work():
        async with AsyncClient(worker.endpoint) as client:
            stream = client.generate("abc", max_tokens=3)
            first = asyncio.create_task(drain(stream))
            await eventually(lambda: engine.has_work, "the first waits")
            with pytest.raises(MiroError, match="another task"):
                await anext(stream)
            engine.gate.set()
            await first
            return stream.result.text

    assert run(work()) == answer(ids_of("abc"), 3)[0]


def test_closing_while_a_task_waits_ends_its_iteration(worker, engine):
    engine.gate.clear()

    async def work():
        async with AsyncClient(worker.endpoint) as client:
            stream = client.generate("abc", max_tokens=3)
            task = asyncio.create_task(drain(stream))
            await eventually(lambda: engine.has_work, "the task waits")
            await stream.aclose()
            await task
            waits = asyncio.create_task(client.complete("abc"))
            await asyncio.sleep(0.01)
            await client.aclose()
            with pytest.raises(ConnectionLost, match="closed"):
                await waits

    run(work())
