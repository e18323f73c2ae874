"""Peers that send more than is reasonable, by hand and below libzmq: the worker goes on serving the others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from raw_client import DEADLINE_S, wait_until

from miro_client import wire
from miro_worker.config import WorkerConfig
from miro_worker.sockets import FRAMES_A_CALL, MAX_FRAMES, RouterSocket

pytestmark = pytest.mark.timeout(60)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
#: A ZMTP PING that asks to be disconnected after 100 s of silence.
ZMTP_PING = b"\x04\x07\x04PING\x03\xe8"


def zmtp(path: Path) -> socket.socket:
    """A DEALER's connection, spoken by hand: one that libzmq does not pace."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(DEADLINE_S)
    connection.connect(str(path))
    connection.sendall(GREETING)
    greeting = b""
    while len(greeting) < len(GREETING):
        greeting += connection.recv(len(GREETING) - len(greeting))
    connection.sendall(b"\x04" + bytes([len(READY)]) + READY)
    connection.recv(4096)
    return connection


def message(*frames: bytes) -> bytes:
    """The frames as ZMTP sends them."""
    flags = [1] * (len(frames) - 1) + [0]
    return b"".join(bytes((flag, len(frame))) + frame for flag, frame in zip(flags, frames, strict=True))


@pytest.fixture
def process(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A worker in a process of its own: libzmq ends a process, not an exception."""
    path = folder / "f.sock"
    program = [sys.executable, str(Path(__file__).parent / "fake_engine.py"), f"ipc://{path}"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        try:
            assert running.stdout
            assert running.stdout.readline() == b"ready\n"
            yield running, path
        finally:
            running.kill()


def test_floods_that_end_in_a_disconnection_do_not_end_the_worker(process, raw):
    running, path = process
    client = raw(f"ipc://{path}")
    cancel = message(*wire.encode(b"12345678", wire.Cancel()))
    opened = time.monotonic()
    connections = [zmtp(path) for _ in range(30)]
    # A heartbeat of the usual 5 s would now fall due between the disconnections and the reading of the queues; the ZMTP
    # PINGs of some are answered then too.
    time.sleep(max(0.0, opened + 4.5 - time.monotonic()))
    for number, connection in enumerate(connections):
        connection.settimeout(0.02)
        with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
            connection.sendall((cancel * 3 + ZMTP_PING) * 1000 if number % 3 == 0 else cancel * 3000)
        connection.close()
    while time.monotonic() < opened + 6.0:
        client.send(wire.Ping())
        assert isinstance(client.receive()[1], wire.Pong)
        time.sleep(0.05)
    assert client.until_end(client.generate())[-1].reason == "length"
    assert running.poll() is None


def test_no_heartbeat_and_room_for_a_burst(folder):
    context = zmq.Context()
    data = RouterSocket(context, f"ipc://{folder}/d.sock", WorkerConfig(), 100)
    try:
        assert data.router.get(zmq.HEARTBEAT_IVL) == 0
        assert data.router.get(zmq.RCVHWM) >= 10 * WorkerConfig().messages_per_second
    finally:
        data.close()
        context.term()


def test_a_message_of_many_frames_is_read_in_turns(folder, raw):
    context = zmq.Context()
    data = RouterSocket(context, f"ipc://{folder}/d.sock", WorkerConfig(), 100)
    try:
        client = raw(data.endpoint)
        count = 20 * FRAMES_A_CALL
        client.frames(*[b""] * count)
        client.send(wire.Ping())
        calls, received = 0, []

        def take() -> bool:
            nonlocal calls
            got = data.receive(0.0)
            calls += data.more
            received.extend([] if got is None else [got.frames])
            return len(received) == 2

        wait_until(take, "both messages")
        assert calls == 20  # the routing id is a frame too
        assert received[0] == [b""] * MAX_FRAMES
        assert received[1][1] == b"\x0a"
    finally:
        data.close()
        context.term()


def test_streams_go_on_while_a_long_message_is_read(serve, raw):
    worker = serve()
    hostile, client = raw(worker), raw(worker)
    hostile.frames(*[b""] * 300_000)
    assert client.until_end(client.generate(max_tokens=20))[-1].reason == "length"
    assert hostile.receive()[1].code == "bad_version"


def test_cancel_of_a_refused_request_gets_no_second_answer(serve, raw):
    worker = serve(max_peer_requests=1)
    client = raw(worker)
    for refused in (wire.Generate(prompt="a", tokens=b"1234"), wire.Generate(prompt="a", echo=True)):
        request = client.send(refused)
        client.send(wire.Cancel(), request)
        assert isinstance(client.receive()[1], wire.Error)
        assert client.silent()
    request = os.urandom(8)
    client.frames(wire.PROTOCOL, bytes([wire.Kind.GENERATE]), request, b"\x81\xa6prompt\x05")
    client.send(wire.Cancel(), request)
    assert client.receive()[1].code == "bad_field"
    assert client.silent()
