"""Starting, failing, stopping; what a worker does when there is nothing to do."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine, answer, ids_of
from raw_client import DEADLINE_S, text_of, wait_until

from miro_client import wire
from miro_client.errors import ConfigError
from miro_worker import Worker, WorkerConfig
from miro_worker import worker as worker_module

PROGRAM = str(Path(__file__).with_name("fake_engine.py"))


@pytest.fixture
def program(folder):
    """Run a worker as a process of its own; returns (process, endpoint) once it is ready."""
    processes = []

    def start(step_seconds: float, grace_ms: int):
        endpoint = f"ipc://{folder}/p.sock"
        command = [sys.executable, PROGRAM, endpoint, str(step_seconds), str(grace_ms)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process, endpoint

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_running_streams_with_restarted(program, raw, number):
    process, endpoint = program(0.005, 100)
    clients = [raw(endpoint) for _ in range(8)]
    requests = [client.generate(f"c{i}", max_tokens=4000) for i, client in enumerate(clients)]
    for client in clients:
        assert isinstance(client.receive()[1], wire.Accepted)
        assert isinstance(client.receive()[1], wire.Chunk)
    process.send_signal(number)
    for client, request in zip(clients, requests, strict=True):
        *chunks, end = client.until_end(request)
        assert (end.reason, end.code) == ("error", "restarted")
        assert [chunk.s for chunk in chunks] == list(range(1, len(chunks) + 1))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert not Path(endpoint.removeprefix("ipc://")).exists()


def test_within_the_grace_time_running_work_finishes_and_new_work_is_refused(program, raw):
    process, endpoint = program(0.01, 10_000)
    client, other = raw(endpoint), raw(endpoint)
    request = client.generate("abc", max_tokens=60)
    assert isinstance(client.receive()[1], wire.Accepted)
    other.send(wire.Ping())
    other.receive()
    process.send_signal(signal.SIGTERM)
    refused = None
    while refused is None:  # the signal takes a moment; each request before it is served
        reply = other.until_end(other.generate("x", max_tokens=1))[-1]
        refused = reply if isinstance(reply, wire.Error) else None
    assert refused.code == "draining"
    replies = client.until_end(request)
    assert (text_of(replies), replies[-1].reason) == (answer(ids_of("abc"), 60)[0], "length")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def unblocked_threads(pid: int) -> list[int]:
    """The threads of a process that may be handed a SIGTERM."""

    def blocks(thread: str) -> bool:
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
        mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

    return [int(thread) for thread in os.listdir(f"/proc/{pid}/task") if not blocks(thread)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the tgkill system call")
def test_a_signal_is_heard_whichever_thread_it_reaches(program, raw):
    tgkill, kinds = 234, 1
    while kinds:
        process, endpoint = program(0.0, 0)
        client = raw(endpoint)
        client.until_end(client.generate())
        time.sleep(0.2)  # until the main thread waits
        others = sorted(set(unblocked_threads(process.pid)) - {process.pid})
        assert len(others) >= 3  # at least the worker's own
        ctypes.CDLL(None).syscall(tgkill, process.pid, others[-kinds], signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        kinds = kinds + 1 if kinds < len(others) else 0


def test_a_second_signal_ends_the_grace_time(program, raw):
    process, endpoint = program(0.005, 60_000)
    client, other = raw(endpoint), raw(endpoint)
    request = client.generate("abc", max_tokens=4000)
    assert isinstance(client.receive()[1], wire.Accepted)
    process.send_signal(signal.SIGTERM)
    # Two signals that wait at once are one: send the second when the first has had its effect.
    while not isinstance(other.until_end(other.generate("x", max_tokens=1))[-1], wire.Error):
        pass
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert client.until_end(request)[-1].code == "restarted"
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_stop_ends_what_is_in_every_thread(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    engine.step_seconds = 0.01
    running = client.generate("run", max_tokens=4000)
    assert isinstance(client.receive()[1], wire.Accepted)
    engine.text_gate.clear()
    whole = client.generate("whole", stream=False)
    queued = client.generate("queued")
    wait_until(lambda: len(engine.prepared) == 2, "one prompt is being prepared, one waits")
    threading.Timer(0.3, engine.text_gate.set).start()
    assert worker.stop(0)
    assert worker.stop(0)
    ends = {}
    while len(ends) < 3:
        got, reply = client.receive()
        if isinstance(reply, wire.End | wire.Error):
            assert got not in ends
            ends[got] = reply
    assert (ends[running].reason, ends[running].code) == ("error", "restarted")
    assert isinstance(ends[whole], wire.Error)
    assert (ends[whole].code, ends[queued].code) == ("restarted", "restarted")
    assert not engine.has_work  # what ran was aborted, the engine can be used again
    assert not engine.closed


def test_stop_does_not_wait_for_an_engine_that_hangs(serve, raw, engine, monkeypatch):
    monkeypatch.setattr(worker_module, "ENGINE_STOP_S", 0.2)
    worker = serve()
    client = raw(worker)
    engine.gate.clear()
    request = client.generate("abc")
    assert isinstance(client.receive()[1], wire.Accepted)
    done = []
    thread = threading.Thread(target=lambda: done.append(worker.stop(50)))
    thread.start()
    assert client.until_end(request)[-1].code == "restarted"
    thread.join(DEADLINE_S)
    assert done == [False]
    engine.gate.set()
    assert worker.stop(0)


def test_a_failed_step_ends_its_requests_and_the_next_ones_run(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    engine.step_errors.append(RuntimeError("broken"))
    replies = client.until_end(client.generate("abc"))
    assert (replies[-1].reason, replies[-1].code) == ("error", "internal")
    assert "broken" not in replies[-1].message
    wait_until(lambda: not engine.has_work, "its request was aborted")
    assert client.until_end(client.generate("abc"))[-1].reason == "length"
    assert worker.error is None


def test_an_engine_that_only_fails_ends_the_worker(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    engine.step_errors.extend(RuntimeError(f"broken {i}") for i in range(20))
    assert client.until_end(client.generate("abc"))[-1].code == "internal"
    assert worker.join(DEADLINE_S)
    assert worker.stop(0)
    assert str(worker.error) == "broken 2"


def test_promise_idle_worker_sleeps(serve, raw, engine, monkeypatch):
    worker = serve()
    client = raw(worker)
    client.until_end(client.generate("abc"))
    client.send(wire.Ping())
    client.receive()
    turns, turn = [], worker._io._turn
    monkeypatch.setattr(worker._io, "_turn", lambda: turns.append(1) or turn())
    steps = engine.steps
    time.sleep(0.5)
    assert len(turns) <= 1  # the one that answered may end late
    assert engine.steps == steps
    client.send(wire.Ping())
    assert client.receive()[1].last_step_age_ms == 0
    assert turns


def test_a_stuck_step_shows_in_its_age(serve, raw, engine):
    client = raw(serve())
    engine.gate.clear()
    client.generate("abc")
    assert isinstance(client.receive()[1], wire.Accepted)
    ages = []
    for _ in range(2):
        time.sleep(0.05)
        client.send(wire.Ping())
        ages.append(client.receive()[1].last_step_age_ms)
    assert 0 < ages[0] < ages[1]


def test_the_socket_is_for_its_owner_only(serve):
    path = serve().endpoint.removeprefix("ipc://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_binding_respects_what_is_there(folder, engine, serve, raw):
    live = serve()
    with pytest.raises(ConfigError, match="in use"):
        Worker(engine, live.endpoint).start()
    client = raw(live)
    assert client.until_end(client.generate())[-1].reason == "length"

    precious = folder / "notes.txt"
    precious.write_text("keep me")
    with pytest.raises(ConfigError, match="not a socket"):
        Worker(engine, f"ipc://{precious}").start()
    assert precious.read_text() == "keep me"

    stale = folder / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    with Worker(engine, f"ipc://{stale}", config=WorkerConfig(grace_ms=0)) as worker:
        client = raw(worker)
        assert client.until_end(client.generate())[-1].reason == "length"
    assert not stale.exists()


@pytest.mark.parametrize(
    "bind",
    ["tcp://127.0.0.1:5555", "ipc://", "ipc://*", "ipc://@x", "inproc://a", "x", "ipc:///nonexistent/dir/a.sock",
     "ipc:///tmp/" + "a" * 200, "ipc:///tmp/a\0b", "ipc:///tmp/\ud800", 5],
)  # fmt: skip
def test_endpoints_that_cannot_be_bound(engine, bind):
    with pytest.raises(ConfigError) as caught:
        Worker(engine, bind).start()
    assert caught.value.field == "bind"


def test_the_default_endpoint_is_private(engine, folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with Worker(engine, config=WorkerConfig(grace_ms=0)) as worker:
        assert worker.endpoint == f"ipc://{folder}/miro/miro.sock"
        assert stat.S_IMODE(os.stat(folder / "miro").st_mode) == 0o700
    (folder / "miro").chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        Worker(engine).start()


def test_a_default_folder_that_cannot_be_made(engine, folder, monkeypatch):
    in_the_way = folder / "file"
    in_the_way.touch()
    (folder / "miro").touch()
    for runtime in (in_the_way, folder / "missing" / "x", folder):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        with pytest.raises(ConfigError, match=r"folder .*miro|is not a directory") as caught:
            Worker(engine).start()
        assert "\n" not in caught.value.message


def test_a_worker_starts_once_and_settings_are_checked(engine, serve):
    worker = serve()
    with pytest.raises(ConfigError):
        worker.start()
    with pytest.raises(ConfigError):
        _ = Worker(engine).endpoint
    assert Worker(engine).stop()
    for wrong in (0, -1, True, 1.5, "x", 2**31):
        with pytest.raises(ConfigError) as caught:
            WorkerConfig(max_requests=wrong)
        assert caught.value.field == "max_requests"


def test_many_workers_start_and_stop_without_leaks(folder):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = None
    for _ in range(5):
        with Worker(FakeEngine(), f"ipc://{folder}/w.sock", config=WorkerConfig(grace_ms=0)):
            pass
        gc.collect()
        before = before or descriptors()
    assert descriptors() <= before
