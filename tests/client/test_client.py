"""The client against a worker with a fake engine, over real sockets."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from fake_engine import answer, ids_of
from raw_client import DEADLINE_S, wait_until

from miro_client import Client, connection, default_endpoint, wire
from miro_client.errors import (
    BadField,
    ConfigError,
    ConnectionLost,
    ContextOverflow,
    InternalError,
    QueueFull,
    RequestTimeout,
    Restarted,
    TooLarge,
)
from miro_client.results import TokenLogprob, Usage
from miro_worker import Worker, WorkerConfig


def test_a_stream_and_its_result(worker, connect):
    stream = connect(worker.endpoint).generate("hello", max_tokens=6, seed=5, logprobs=1, temperature=np.float32(0.5))
    with pytest.raises(ConnectionLost):
        _ = stream.result
    chunks = list(stream)
    text, tokens = answer(ids_of("hello"), 6)
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token for chunk in chunks for token in chunk.tokens] == tokens
    assert [entry for chunk in chunks for entry in chunk.logprobs] == [
        TokenLogprob(-0.5, [(token, -0.5)]) for token in tokens
    ]
    result = stream.result
    assert (result.text, result.tokens, result.finish_reason) == (text, tokens, "length")
    assert result.usage == Usage(5, 0, 6)
    assert (result.prompt_tokens, result.seed, result.fingerprint) == (ids_of("hello"), 5, "fake/1")
    assert stream.prompt_tokens == ids_of("hello")
    assert result.timing.decode_ms == 3.0
    assert list(stream) == []


def test_a_whole_answer(worker, connect):
    client = connect(worker.endpoint)
    streamed = client.generate("hello", max_tokens=3, logprobs=1)
    list(streamed)
    whole = client.complete("hello", max_tokens=3, logprobs=1)
    whole.timing = streamed.result.timing
    assert whole == streamed.result


def test_tokens_and_messages(worker, connect):
    client = connect(worker.endpoint)
    assert client.complete(tokens=np.array([3, 4]), max_tokens=2).text == answer([3, 4], 2)[0]
    messages = [{"role": "user", "content": "x"}]
    assert client.complete(messages=messages, max_tokens=2).prompt_tokens == ids_of("user:x\n")


def test_streams_of_one_client_run_side_by_side(worker, connect):
    client = connect(worker.endpoint)
    streams = [client.generate(f"s{i}", max_tokens=20 + i) for i in range(5)]
    texts = [""] * 5
    live = set(range(5))
    while live:
        for i in sorted(live):
            chunk = next(streams[i], None)
            if chunk is None:
                live.discard(i)
            else:
                texts[i] += chunk.text
        client.ping()
    assert texts == [answer(ids_of(f"s{i}"), 20 + i)[0] for i in range(5)]


def test_one_client_in_many_threads(worker, connect):
    client = connect(worker.endpoint)
    results = {}

    def work(number: int) -> None:
        for round_ in range(5):
            results[number, round_] = client.complete(f"{number}/{round_}", max_tokens=4).text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == {(i, r): answer(ids_of(f"{i}/{r}"), 4)[0] for i in range(8) for r in range(5)}


@pytest.mark.parametrize("end", ["close", "with", "drop", "break", "cycle", "client"])
def test_an_abandoned_iterator_cancels(worker, connect, engine, end):
    engine.step_seconds = 0.002
    client = connect(worker.endpoint)
    stream = client.generate("abc", max_tokens=4000)
    next(stream)
    assert engine.has_work
    if end == "close":
        stream.close()
        stream.close()
        assert next(stream, None) is None
    elif end == "with":
        with stream:
            pass
    elif end == "break":
        for _ in stream:
            break
        del stream
    elif end == "cycle":
        loop = [stream]
        loop.append(loop)
        del stream, loop
        gc.collect()
    elif end == "drop":
        del stream
    else:
        client.close()
        with pytest.raises(ConnectionLost):
            list(stream)
    wait_until(lambda: not engine.has_work, "the worker stopped")
    if end != "client":
        assert client.complete("x", max_tokens=1).finish_reason == "length"


def test_a_client_that_is_held_only_by_its_stream_stays_open(worker):
    chunks = [chunk for chunk in Client(worker.endpoint).generate("abc", max_tokens=5)]  # noqa: C416
    assert "".join(chunk.text for chunk in chunks) == answer(ids_of("abc"), 5)[0]


def test_refusals_are_typed(worker, connect, engine):
    client = connect(worker.endpoint)
    with pytest.raises(ContextOverflow) as caught:
        client.complete("abc", max_tokens=5000)
    assert caught.value.field == "max_tokens"
    with pytest.raises(BadField) as caught:
        list(client.generate("abc", temperature=7))
    assert caught.value.field == "temperature"
    with pytest.raises(BadField) as caught:
        client.complete("abc", colour="red")
    assert caught.value.field == "colour"
    engine.add_errors.append(QueueFull("full", retry_after_ms=77))
    with pytest.raises(QueueFull) as caught:
        next(client.generate("abc"))
    assert caught.value.retry_after_ms == 77
    engine.step_errors.append(RuntimeError("broken"))
    with pytest.raises(InternalError):
        list(client.generate("abc"))
    assert client.complete("abc", max_tokens=1).finish_reason == "length"


def test_mistakes_are_found_before_anything_is_sent(connect, endpoint):
    client = connect(endpoint)  # there is no worker
    for arguments in (
        {},
        {"prompt": "a", "tokens": [1]},
        {"tokens": [2**40]},
        {"messages": [{"who": "x"}]},
        {"prompt": "\ud800"},
        {"prompt": "a", "stop": object()},
    ):
        with pytest.raises(BadField):
            client.generate(**arguments)
    with pytest.raises(TooLarge):
        client.generate("a" * wire.MAX_MESSAGE_BYTES)
    with pytest.raises(ConfigError):
        Client("nonsense")


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/\ud800", "\ud800", "ipc:///tmp/a\0b", 5, b"ipc:///tmp/a", "", "nonsense"]
)
def test_endpoints_that_cannot_be_used(endpoint):
    with pytest.raises(ConfigError) as caught:
        Client(endpoint)
    assert caught.value.field == "endpoint"


def test_a_default_folder_that_is_a_file(monkeypatch, folder):
    (folder / "miro").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(ConfigError, match="not a directory"):
        Client()


@pytest.mark.parametrize("timeout", ["a", -1, float("nan"), float("inf"), 1e300, [1]])
def test_timeouts_that_cannot_be_waited_for(worker, connect, engine, timeout):
    client = connect(worker.endpoint)
    for call in (
        lambda: Client(worker.endpoint, timeout=timeout),
        lambda: client.generate("a", timeout=timeout),
        lambda: client.complete("a", timeout=timeout),
        lambda: client.ping(timeout),
        lambda: client.hello(timeout),
    ):
        with pytest.raises(BadField) as caught:
            call()
        assert caught.value.field == "timeout"
    assert not engine.prepared


def test_a_timeout_cancels(worker, connect, engine):
    client = connect(worker.endpoint)
    engine.gate.clear()
    with pytest.raises(RequestTimeout):
        client.complete("abc", timeout=0.05)
    with pytest.raises(TimeoutError):
        list(client.generate("abc", timeout=0.05))
    engine.gate.set()
    wait_until(lambda: not engine.has_work, "both were cancelled")
    assert client.complete("abc", max_tokens=1).finish_reason == "length"


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


def test_a_silent_worker_is_lost(connect, endpoint, monkeypatch):
    monkeypatch.setattr(connection, "PROBE_S", 0.05)
    monkeypatch.setattr(connection, "LOST_S", 0.2)
    with Silent(endpoint, lambda frames: []), pytest.raises(ConnectionLost, match="silent"):
        connect(endpoint, timeout=None).complete("abc")


def test_a_request_the_worker_forgot_is_lost_and_one_it_knows_is_not(connect, endpoint, monkeypatch):
    monkeypatch.setattr(connection, "PROBE_S", 0.05)
    known: list[bytes] = []
    pings = []

    def reply(frames):
        if frames[1] == b"\x02" and not known:
            known.append(frames[2])
        elif frames[1] == b"\x0a":
            pings.append(1)
            yield wire.encode(frames[2], wire.Pong(epoch=1, live=known))

    with Silent(endpoint, reply):
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
def test_what_the_client_does_not_understand_is_ignored(connect, endpoint, frames):
    def reply(got):
        yield frames
        yield wire.encode(got[2], wire.Pong(epoch=3))

    with Silent(endpoint, reply):
        assert connect(endpoint).ping().epoch == 3


def test_a_lost_chunk_is_noticed(connect, endpoint):
    def reply(got):
        if got[1] == b"\x02":
            yield wire.encode(got[2], wire.Chunk(s=0, t="a"))
            yield wire.encode(got[2], wire.Chunk(s=2, t="c"))

    with Silent(endpoint, reply):
        stream = connect(endpoint).generate("abc")
        assert next(stream).text == "a"
        with pytest.raises(ConnectionLost, match="chunk 1"):
            next(stream)


def test_a_code_of_a_newer_worker_is_an_internal_error(connect, endpoint):
    def reply(got):
        yield wire.encode(got[2], wire.Error(code="from_the_future", message="m"))

    with Silent(endpoint, reply), pytest.raises(InternalError, match="from_the_future"):
        connect(endpoint).complete("abc")


def test_closing_is_prompt_and_final(worker, connect, endpoint):
    client = connect(worker.endpoint)
    client.ping()
    client.close()
    client.close()
    assert not client._connection._thread.is_alive()
    with pytest.raises(ConnectionLost, match="closed"):
        client.complete("abc")
    unused = connect(f"{endpoint}.nobody")
    unused.close()
    assert not unused._connection._thread.is_alive()


def test_an_idle_client_sleeps(worker, connect, monkeypatch):
    client = connect(worker.endpoint)
    client.complete("abc", max_tokens=2)
    turns, take = [], client._connection._take_commands
    monkeypatch.setattr(client._connection, "_take_commands", lambda: turns.append(1) or take())
    time.sleep(0.3)
    assert len(turns) <= 1  # the one that delivered the answer may end late
    client.ping()
    assert turns


def test_hello_and_ping(worker, connect, engine):
    client = connect(worker.endpoint)
    welcome = client.hello()
    assert (welcome.model, welcome.context, welcome.fingerprint) == ("fake", engine.context, engine.fingerprint)
    pong = client.ping()
    assert (pong.epoch, pong.running, pong.live) == (welcome.epoch, 0, [])


def test_the_default_endpoint(monkeypatch, folder):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_endpoint() == f"ipc://{folder}/miro/miro.sock"
    for unusable in ("", "relative/dir"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert default_endpoint().startswith("ipc:///tmp/miro-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "miro").mkdir(mode=0o777)
    (folder / "miro").chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        Client()


def test_importing_the_client_loads_neither_zeromq_nor_an_engine():
    code = (
        "import sys, miro_client; from miro_client import default_endpoint, MiroError; default_endpoint(); "
        "print(sorted({'zmq', 'msgspec', 'numpy', 'miro_cy', 'miro_worker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
    code = "import sys; from miro_client import Client; print(sorted({'numpy', 'miro_cy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_program_that_forgets_to_close_still_ends(worker):
    code = f"""
from miro_client import Client
client = Client({worker.endpoint!r})
stream = client.generate("abc", max_tokens=4000)
print(next(stream).text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == answer(ids_of("abc"), 1)[0].strip()


def test_after_a_fork_the_old_client_refuses_and_a_new_one_works(worker):
    code = f"""
import os
from miro_client import Client
from miro_client.errors import ConnectionLost
client = Client({worker.endpoint!r})
stream = client.generate("abc", max_tokens=4000)
next(stream)
child = os.fork()
if not child:
    for use in (client.ping, lambda: next(stream)):
        try:
            use()
        except ConnectionLost as error:
            print("refused", flush=True)
    client.close()
    print(Client({worker.endpoint!r}).complete("abc", max_tokens=1).text, flush=True)
    os._exit(0)
os.waitpid(child, 0)
next(stream)
print(client.complete("abc", max_tokens=1).text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    text = answer(ids_of("abc"), 1)[0]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"refused\nrefused\n{text}\n{text}\n"
