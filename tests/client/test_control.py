"""What a client asks about the worker itself: stats, health, models, drain."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

import pytest
from raw_client import DEADLINE_S, wait_until

from miro_client import AsyncClient, Client, wire
from miro_client.errors import BadField, ConnectionLost, Draining, RequestTimeout


async def ask(client: Client | AsyncClient, name: str, *arguments: Any) -> Any:
    """The same question to either client."""
    answer = getattr(client, name)(*arguments)
    return await answer if inspect.isawaitable(answer) else answer


@pytest.fixture(params=[Client, AsyncClient])
def client(request, worker):
    client = request.param(worker.endpoint, timeout=DEADLINE_S)
    yield client
    client._finalizer()


def run(client: Client | AsyncClient, name: str, *arguments: Any) -> Any:
    return asyncio.run(asyncio.wait_for(ask(client, name, *arguments), DEADLINE_S))


def test_the_worker_tells_of_itself(client, worker, engine):
    with Client(worker.endpoint, timeout=DEADLINE_S) as user:
        user.complete("abc", max_tokens=3)
    stats = run(client, "stats")
    assert (stats.requests, stats.ended, stats.live) == (1, {"length": 1}, 0)
    health = run(client, "health")
    assert (health.status, health.ready, health.epoch) == ("ok", True, stats.epoch)
    (model,) = run(client, "models")
    assert (model.name, model.context) == (engine.name, engine.context)


def test_health_answers_while_a_step_hangs(client, worker, engine):
    engine.gate.clear()
    with Client(worker.endpoint) as user:
        stream = user.generate("abc", max_tokens=3)
        wait_until(lambda: run(client, "stats").live == 1, "it is live")
        assert run(client, "health").last_step_age_ms >= 0
        engine.gate.set()
        assert len(list(stream)) == 3


def test_drain_ends_the_worker(client, worker, engine):
    engine.step_seconds = 0.02
    with Client(worker.endpoint, timeout=DEADLINE_S) as user:
        stream = user.generate("abc", max_tokens=30)
        next(stream)
        assert run(client, "drain", 20_000) == 1
        with pytest.raises((Draining, ConnectionLost)):
            user.complete("late", max_tokens=1)
        assert len(list(stream)) == 29
    assert worker.join(DEADLINE_S)
    assert worker.error is None


@pytest.mark.parametrize("grace", [-1, 2**31, 1.5, "1", True])
def test_a_grace_time_out_of_range_is_refused_here(client, worker, grace):
    with pytest.raises(BadField, match="grace_ms") as caught:
        run(client, "drain", grace)
    assert caught.value.field == "grace_ms"
    assert run(client, "health").ready


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["stats", "health", "models", "drain"])
def test_a_worker_that_is_not_there(endpoint, kind, name, monkeypatch):
    monkeypatch.setattr("miro_client.connection.CONNECT_S", 0.3)
    client = kind(endpoint)
    began = time.monotonic()
    with pytest.raises((ConnectionLost, RequestTimeout)):
        run(client, name)
    assert time.monotonic() - began < DEADLINE_S
    client._finalizer()
    with pytest.raises(ConnectionLost):
        run(client, name)


def test_closing_closes_every_connection(worker):
    client = Client(worker.endpoint)
    client.stats()
    connections = list(client._connections.values())
    assert len(connections) == 2
    client.close()
    assert not any(connection._thread.is_alive() for connection in connections)


def test_a_result_of_another_kind_is_no_answer():
    with pytest.raises(BadField):
        wire.Result(b"\x80").read(wire.HealthReply)
