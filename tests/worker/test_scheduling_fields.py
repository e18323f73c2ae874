"""Priority, deadlines and the client's identity on their way from a message to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miro_client import Client, wire

Serve, Connect = Callable[..., Any], Callable[..., Any]


def test_the_engine_is_told_what_the_client_asked_for(serve: Serve, raw: Connect, engine: Any) -> None:
    peer = raw(serve())
    peer.until_end(peer.generate(priority=-7, queue_ms=60_000, deadline_ms=120_000))
    peer.until_end(peer.generate())
    told, plain = engine.requests
    assert told.priority == -7
    assert 0 < told.queue_ms <= 60_000 < told.deadline_ms <= 120_000, "what is left of them"
    assert (plain.priority, plain.queue_ms, plain.deadline_ms) == (0, None, None)


def test_a_connection_is_a_client(serve: Serve, raw: Connect, engine: Any) -> None:
    worker = serve()
    one, other = raw(worker), raw(worker)
    for peer in (one, one, other):
        peer.until_end(peer.generate())
    first, second, third = (request.client for request in engine.requests)
    assert first == second != third
    assert first


def test_deadlines_count_from_the_receipt(serve: Serve, raw: Connect, engine: Any) -> None:
    """A prompt that waits for the text thread longer than its deadline has next to nothing left of it."""
    peer = raw(serve())
    engine.text_gate.clear()
    request = peer.generate(deadline_ms=50)
    assert peer.silent(0.2)
    engine.text_gate.set()
    peer.until_end(request)
    assert 0 < engine.requests[0].deadline_ms <= 0.001


def test_a_client_names_them_beside_the_sampling_parameters(serve: Serve, engine: Any) -> None:
    with Client(serve().endpoint) as client:
        client.complete("abc", max_tokens=2, priority=3, deadline_ms=60_000)
        for _ in client.generate("abc", max_tokens=2, queue_ms=60_000):
            pass
    assert [request.priority for request in engine.requests] == [3, 0]
    assert [request.queue_ms is None for request in engine.requests] == [True, False]


def test_the_wire_takes_them_and_leaves_them_out() -> None:
    frames = wire.encode(b"12345678", wire.Generate(prompt="a", priority=5, queue_ms=1, deadline_ms=2))
    body = wire.decode_request(wire.Kind.GENERATE, frames[-1])
    assert isinstance(body, wire.Generate)
    assert (body.priority, body.queue_ms, body.deadline_ms) == (5, 1, 2)
    assert b"deadline" not in wire.encode(b"12345678", wire.Generate(prompt="a"))[-1]
