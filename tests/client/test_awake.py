"""A process that was stopped for a while, alone or with its machine: nobody is blamed for what it did not see."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from raw_client import DEADLINE_S, Raw, wait_until

from miro_client import connection, wire
from miro_client.awake import TICK_S, AwakeClock, join_all
from miro_worker import Worker, WorkerConfig
from miro_worker import worker as worker_module

#: Longer than any limit.
STOPPED_S = 3600.0


class Stopped:
    """Makes clocks that run on while the process "is stopped"."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def clock(self) -> AwakeClock:
        return AwakeClock(lambda: time.monotonic() + self.seconds)

    def for_long(self) -> None:
        self.seconds += STOPPED_S


@pytest.fixture
def stopped(monkeypatch) -> Stopped:
    stopped = Stopped()
    monkeypatch.setattr(connection, "AwakeClock", stopped.clock)
    monkeypatch.setattr(worker_module, "AwakeClock", stopped.clock)
    return stopped


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_stretch_without_ticks_counts_as_one():
    now = 5.0
    clock = AwakeClock(lambda: now)
    assert clock() == 0.0
    for step, counted in ((TICK_S / 4, TICK_S / 4), (STOPPED_S, TICK_S), (0.0, 0.0), (-1.0, 0.0), (TICK_S, TICK_S)):
        before = clock()
        now += step
        assert clock() == before, "time passes with a tick alone"
        clock.tick()
        assert clock() == pytest.approx(before + counted)


def test_a_thread_may_end_after_a_stop():
    class Late:
        """Ends soon; but the process is stopped during the first wait for it."""

        waits = 0

        def is_alive(self) -> bool:
            return self.waits < 2

        def join(self, timeout: float) -> None:
            nonlocal now
            assert timeout <= TICK_S
            self.waits += 1
            now += STOPPED_S if self.waits == 1 else 0.01

    now = 0.0
    late = Late()
    assert join_all([late], 2 * TICK_S, AwakeClock(lambda: now))
    assert late.waits == 2


def test_a_thread_that_does_not_end_is_not_waited_for():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert not join_all([thread], 0.05)
    finally:
        end.set()
    assert join_all([thread], DEADLINE_S)


def test_a_client_that_was_stopped_waits_on_for_its_answer(connect, endpoint, silent, stopped):
    """The worker, stopped with it, gets time to answer."""
    first: list[bytes] = []

    def reply(frames):
        if frames[1] == b"\x02" and not first:
            first.append(frames[2])
            yield wire.encode(first[0], wire.Chunk(s=0, t="a"))
        elif frames[1] == b"\x02":
            yield wire.encode(first[0], wire.Chunk(s=1, t="b"))
            yield wire.encode(first[0], wire.End(reason="stop", usage=wire.Usage(), timing=wire.Timing()))
        elif frames[1] == b"\x0a":
            yield wire.encode(frames[2], wire.Pong(epoch=1, live=first))

    with silent(endpoint, reply):
        client = connect(endpoint)
        stream = client.generate("abc")
        assert next(stream).text == "a"
        stopped.for_long()
        other = client.generate("go on")
        assert [chunk.text for chunk in stream] == ["b"]
        other.close()


def test_a_client_that_was_stopped_tries_on_to_connect(connect, endpoint, silent, stopped):
    client, epochs = connect(endpoint), []
    asked = threading.Thread(target=lambda: epochs.append(client.ping().epoch))
    asked.start()
    wait_until(lambda: client._connection._calls, "it waits for a worker")
    stopped.for_long()
    time.sleep(2 * TICK_S)  # a turn or two
    with silent(endpoint, lambda frames: [wire.encode(frames[2], wire.Pong(epoch=7))]):
        asked.join(DEADLINE_S)
    assert epochs == [7]


def test_a_worker_that_was_stopped_calls_no_client_slow(engine, endpoint, context, stopped):
    with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)) as worker:
        client = Raw(context, endpoint)
        request = client.generate("abc", max_tokens=40, credit=1)
        assert isinstance(client.receive()[1], wire.Accepted)
        assert isinstance(client.receive()[1], wire.Chunk)
        wait_until(lambda: worker._io._sessions.delivery.waiting, "the rest waits for credit")
        stopped.for_long()
        for _ in range(2):
            client.send(wire.Ping())
            assert client.receive()[1].live == [request]
            time.sleep(TICK_S / 2)  # for the turn to end: then clients are looked after
        client.send(wire.Credit(add=5), request)
        assert client.until_end(request)[-1].reason == "length"
