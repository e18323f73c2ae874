"""A worker with a fake engine on a real socket, and raw sockets that speak the protocol by hand."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import FakeEngine

from miro_client import wire
from miro_worker import Worker, WorkerConfig

DEADLINE_S = 15.0


class Raw:
    """A DEALER (or REQ) that sends frames as they are; every wait has a deadline."""

    def __init__(self, context: zmq.Context, endpoint: str, kind: int = zmq.DEALER, **options: Any) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def send(self, body: wire.Request, request_id: bytes | None = None) -> bytes:
        request_id = os.urandom(8) if request_id is None else request_id
        self.frames(*wire.encode(request_id, body))
        return request_id

    def generate(self, prompt: str = "abc", request_id: bytes | None = None, **fields: Any) -> bytes:
        sampling = {"max_tokens": fields.pop("max_tokens", 4)} | fields.pop("sampling", {})
        fields.setdefault("stream", True)
        return self.send(wire.Generate(prompt=prompt, sampling=sampling, **fields), request_id)

    def receive(self, timeout: float = DEADLINE_S) -> tuple[bytes, wire.Reply]:
        assert self.socket.poll(timeout * 1000), "no reply before the deadline"
        return wire.decode_reply(self.socket.recv_multipart())

    def silent(self, seconds: float = 0.2) -> bool:
        return not self.socket.poll(seconds * 1000)

    def until_end(self, request_id: bytes) -> list[wire.Reply]:
        """All replies to a request up to its terminal one; those to others are dropped."""
        replies = []
        while True:
            got, reply = self.receive()
            if got != request_id:
                continue
            replies.append(reply)
            if isinstance(reply, wire.End | wire.Error):
                return replies

    def close(self) -> None:
        self.socket.close()


def text_of(replies: list[wire.Reply]) -> str:
    return "".join(reply.t for reply in replies if isinstance(reply, wire.Chunk))


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not before the deadline: {what}"
        time.sleep(0.005)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: the names of Unix sockets are limited."""
    path = Path(tempfile.mkdtemp(prefix="miro-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serve(folder: Path, engine: FakeEngine) -> Iterator[Callable[..., Worker]]:
    """Start a worker with the given settings; stops it at the end, whatever the test left open."""
    workers: list[Worker] = []

    def start(**settings: Any) -> Worker:
        settings.setdefault("grace_ms", 100)
        worker = Worker(engine, f"ipc://{folder}/{len(workers)}.sock", config=WorkerConfig(**settings))
        workers.append(worker)
        return worker.start()

    yield start
    engine.gate.set()
    engine.text_gate.set()
    for worker in workers:
        worker.stop(0)


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    context = zmq.Context()

    def connect(worker: Worker | str, kind: int = zmq.DEALER, **options: Any) -> Raw:
        return Raw(context, worker if isinstance(worker, str) else worker.endpoint, kind, **options)

    yield connect
    context.destroy(linger=0)
