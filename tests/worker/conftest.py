"""A worker with a fake engine on a real socket, and raw clients."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import FakeEngine
from raw_client import Raw

from miro_worker import Worker, WorkerConfig


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
    engine.warm_gate.set()
    for worker in workers:
        worker.stop(0)


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    context = zmq.Context()

    def connect(worker: Worker | str, kind: int = zmq.DEALER, **options: Any) -> Raw:
        return Raw(context, worker if isinstance(worker, str) else worker.endpoint, kind, **options)

    yield connect
    context.destroy(linger=0)
