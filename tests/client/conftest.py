"""A worker with the fake engine of tests/worker, and clients that are closed whatever happens."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))
from fake_engine import FakeEngine
from raw_client import DEADLINE_S

from miro_client import Client
from miro_worker import Worker, WorkerConfig


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: the names of Unix sockets are limited."""
    path = Path(tempfile.mkdtemp(prefix="miro-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/c.sock"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine, endpoint: str) -> Iterator[Worker]:
    worker = Worker(engine, endpoint, config=WorkerConfig(grace_ms=100)).start()
    yield worker
    engine.gate.set()
    engine.text_gate.set()
    worker.stop(0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients = []

    def make(endpoint: str, timeout: float = DEADLINE_S) -> Client:
        clients.append(Client(endpoint, timeout=timeout))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class Silent:
    """A ROUTER that answers only as told: `reply(frames) -> frames or None`."""

    def __init__(self, endpoint: str, reply) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.reply = reply
        self.open = True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while self.open:
            if self.socket.poll(20):
                routing_id, *frames = self.socket.recv_multipart()
                for answer_ in self.reply(frames):
                    self.socket.send_multipart([routing_id, *answer_])

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.open = False
        self.thread.join(DEADLINE_S)
        self.context.destroy(linger=0)


@pytest.fixture
def silent() -> type[Silent]:
    return Silent
