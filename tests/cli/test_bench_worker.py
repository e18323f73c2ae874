"""What measuring a worker refuses before it asks for anything, and how it ends, with a client of its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from miro_client.cli.bench_worker import WorkerPlan, run_bench
from miro_client.errors import ConfigError, QueueFull

DEADLINE_S = 30.0
pytestmark = pytest.mark.timeout(60)


class Stream:
    """Gives a chunk when told to, or the error; ends when the client is closed."""

    def __init__(self, client: Client, error: Exception | None) -> None:
        self._client = client
        self._error = error

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if not self._client.closed.wait(DEADLINE_S):
            raise AssertionError("nobody closed the client")
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Client:
    """Its streams wait, but for the last one, which fails."""

    endpoint = "ipc:///nowhere"

    def __init__(self, context: int = 512, requests: int = 64) -> None:
        self._context = context
        self._requests = requests
        self._errors: list[Exception | None] = [None, None, QueueFull("full")]
        self.asked = 0
        self.closed = threading.Event()

    def hello(self) -> Any:
        return SimpleNamespace(server="fake", limits=SimpleNamespace(requests=self._requests))

    def models(self) -> list[Any]:
        return [SimpleNamespace(context=self._context, vocab_size=100)]

    def complete(self, **_: Any) -> Any:
        self.asked += 1
        usage, timing = SimpleNamespace(cached_tokens=0), SimpleNamespace(prefill_ms=1.0)
        return SimpleNamespace(usage=usage, timing=timing)

    def generate(self, **_: Any) -> Stream:
        self.asked += 1
        return Stream(self, self._errors.pop(0))

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (WorkerPlan(prompts=(5, 512)), "prompt"),
        (WorkerPlan(prompts=(1_000_000_000,)), "prompt"),
        (WorkerPlan(prompts=(10**30,)), "prompt"),
        (WorkerPlan(depths=(10**30,)), "depth"),
        (WorkerPlan(depths=(32, 480)), "depth"),
        (WorkerPlan(tokens=512), "depth"),
        (WorkerPlan(rows=(1, 65)), "rows"),
    ],
)
def test_what_the_worker_has_no_room_for_is_refused_before_anything_is_measured(plan: WorkerPlan, field: str) -> None:
    client = Client()
    with pytest.raises(ConfigError) as caught:
        run_bench(client, plan)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert client.asked == 0


def test_a_worker_that_does_not_tell_how_many_requests_it_takes() -> None:
    assert [work.rows for work in WorkerPlan(rows=(200,)).works(512, 0)] == [1, 200]


def test_the_first_stream_that_fails_ends_the_measurement() -> None:
    client = Client()
    with pytest.raises(QueueFull):
        run_bench(client, WorkerPlan(prompts=(5,), rows=(3,)))  # type: ignore[arg-type]
    assert client.closed.is_set()
