"""Workers that are not there, go away, fall silent or say what the client does not understand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from fake_engine import answer, ids_of
from raw_client import DEADLINE_S, wait_until

from miro_client import connection, wire
from miro_client.errors import (
    ConnectionLost,
    InternalError,
    RequestTimeout,
    Restarted,
)
from miro_worker import Worker, WorkerConfig


def test_no_worker(connect, endpoint, monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_S", 0.1)
    client = connect(endpoint)
    with pytest.raises(ConnectionLost, match="no worker answers at ipc"):
        client.complete("abc")
    with pytest.raises(ConnectionLost):
        client.ping()


def test_a_worker_that_comes_up_late_does_not_get_what_was_given_up(connect, endpoint, engine, monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_S", 0.1)
    client = connect(endpoint)
    with pytest.raises(ConnectionLost):
        client.complete("given up")
    monkeypatch.setattr(connection, "CONNECT_S", DEADLINE_S)
    results = []
    thread = threading.Thread(target=lambda: results.append(client.complete("patient", max_tokens=2).text))
    thread.start()
    time.sleep(0.1)
    with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)):
        thread.join(DEADLINE_S)
    assert results == [answer(ids_of("patient"), 2)[0]]
    assert engine.prepared == ["patient"]


@pytest.mark.parametrize("end", ["close", "drop", "timeout"])
def test_what_nobody_waits_for_takes_no_memory_while_there_is_no_worker(connect, endpoint, monkeypatch, end):
    monkeypatch.setattr(connection, "CONNECT_S", 10 * DEADLINE_S)
    client = connect(endpoint)
    calls, streams = weakref.WeakSet(), []
    for _ in range(20):
        stream = client.generate("x" * 100_000, timeout=0.01)
        calls.add(stream._call)
        if end == "close":
            stream.close()
            streams.append(stream)
        elif end == "timeout":
            with pytest.raises(RequestTimeout):
                next(stream)
            streams.append(stream)
        del stream
    # An answer that is kept keeps its request, but not what was to be sent.
    wait_until(lambda: not any(call.frames for call in calls), "what was to be sent is dropped")
    streams.clear()
    wait_until(lambda: not calls, "the requests are forgotten")


def test_what_no_worker_took_takes_no_memory(connect, endpoint, monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_S", 0.1)
    streams = [connect(endpoint).generate("x" * 100_000) for _ in range(2)]
    for stream in streams:
        with pytest.raises(ConnectionLost):
            next(stream)
    assert not any(stream._call.frames for stream in streams)


def test_a_worker_that_stops_and_one_that_takes_its_place(connect, endpoint, engine):
    engine.step_seconds = 0.002
    client = connect(endpoint)
    with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)) as first:
        epoch = client.ping().epoch
        stream = client.generate("abc", max_tokens=4000)
        next(stream)
        first.stop(0)
        with pytest.raises(Restarted):
            list(stream)
    with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)):
        assert client.complete("abc", max_tokens=2).text == answer(ids_of("abc"), 2)[0]
        assert client.ping().epoch != epoch


def test_a_worker_that_is_killed(connect, endpoint, folder):
    program = str(Path(__file__).parent.parent / "worker" / "fake_engine.py")
    with subprocess.Popen([sys.executable, program, endpoint, "0.002"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            stream = connect(endpoint, timeout=None).generate("abc", max_tokens=4000)
            next(stream)
        finally:
            process.kill()
        with pytest.raises(ConnectionLost, match="closed the connection"):
            list(stream)


def test_a_silent_worker_is_lost(connect, endpoint, monkeypatch, silent):
    monkeypatch.setattr(connection, "PROBE_S", 0.05)
    monkeypatch.setattr(connection, "LOST_S", 0.2)
    with silent(endpoint, lambda frames: []), pytest.raises(ConnectionLost, match="silent"):
        connect(endpoint, timeout=None).complete("abc")


def test_a_request_the_worker_forgot_is_lost_and_one_it_knows_is_not(connect, endpoint, monkeypatch, silent):
    monkeypatch.setattr(connection, "PROBE_S", 0.05)
    known: list[bytes] = []
    pings = []

    def reply(frames):
        if frames[1] == b"\x02" and not known:
            known.append(frames[2])
        elif frames[1] == b"\x0a":
            pings.append(1)
            yield wire.encode(frames[2], wire.Pong(epoch=1, live=known))

    with silent(endpoint, reply):
        client = connect(endpoint)
        kept = client.generate("kept", timeout=0.6)
        wait_until(lambda: known, "the first request is known")
        with pytest.raises(ConnectionLost, match="no longer knows"):
            client.complete("forgotten", timeout=None)
        with pytest.raises(RequestTimeout):
            next(kept)
    assert len(pings) > 1


@pytest.mark.parametrize(
    "frames",
    [
        [b"junk"],
        [b""],
        [b"MIRO1", b"\x83", b"12345678", b"\xc1"],
        [b"MIRO1", b"\x99", b"12345678", b"\x80"],
        [b"MIRO2", b"\x83", b"12345678", b"\x80"],
    ],
)
def test_what_the_client_does_not_understand_is_ignored(connect, endpoint, frames, silent):
    def reply(got):
        yield frames
        yield wire.encode(got[2], wire.Pong(epoch=3))

    with silent(endpoint, reply):
        assert connect(endpoint).ping().epoch == 3


def test_a_lost_chunk_is_noticed(connect, endpoint, silent):
    def reply(got):
        if got[1] == b"\x02":
            yield wire.encode(got[2], wire.Chunk(s=0, t="a"))
            yield wire.encode(got[2], wire.Chunk(s=2, t="c"))

    with silent(endpoint, reply):
        stream = connect(endpoint).generate("abc")
        assert next(stream).text == "a"
        with pytest.raises(ConnectionLost, match="chunk 1"):
            next(stream)


def test_a_code_of_a_newer_worker_is_an_internal_error(connect, endpoint, silent):
    def reply(got):
        yield wire.encode(got[2], wire.Error(code="from_the_future", message="m"))

    with silent(endpoint, reply), pytest.raises(InternalError, match="from_the_future"):
        connect(endpoint).complete("abc")
