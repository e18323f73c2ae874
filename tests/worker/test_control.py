"""The control and admin sockets: what a worker says of itself, whatever else it is busy with."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from raw_client import DEADLINE_S, Raw, wait_until

from miro_client import wire
from miro_client.endpoint import admin_endpoint, control_endpoint
from miro_client.errors import ConfigError, NonFinite
from miro_worker import Worker, WorkerConfig

PROGRAM = str(Path(__file__).with_name("fake_engine.py"))


@pytest.fixture
def control(raw):
    return lambda worker: raw(control_endpoint(worker.endpoint))


def ask(client: Raw, body: wire.Request, kind: type):
    request = client.send(body)
    got, reply = client.receive()
    assert got == request
    assert isinstance(reply, wire.Result), reply
    return reply.read(kind)


def stats(client: Raw) -> wire.StatsReply:
    return ask(client, wire.Stats(), wire.StatsReply)


def health(client: Raw) -> wire.HealthReply:
    return ask(client, wire.Health(), wire.HealthReply)


def test_health_is_green_only_after_a_first_token(serve, control, engine):
    engine.warm_gate.clear()
    client = control(worker := serve())
    before = health(client)
    assert (before.status, before.ready) == ("starting", False)
    engine.warm_gate.set()
    wait_until(lambda: health(client).ready, "green")
    assert health(client).status == "ok"
    assert worker.error is None


def test_requests_that_come_before_the_first_token_are_served_after_it(serve, raw, engine):
    engine.warm_gate.clear()
    client = raw(serve())
    request = client.generate("early", max_tokens=2)
    assert client.silent()
    engine.warm_gate.set()
    assert client.until_end(request)[-1].reason == "length"


def test_an_engine_that_gives_no_token_ends_the_worker(folder, engine):
    engine.warm_errors.append(NonFinite("nothing but NaN"))
    told = []
    worker = Worker(engine, f"ipc://{folder}/w.sock")
    assert worker.run(lambda: told.append("ready")) == 1
    assert told == []
    assert isinstance(worker.error, NonFinite)


def test_ready_is_told_once_after_the_first_token(folder, raw):
    process = subprocess.Popen(
        [sys.executable, PROGRAM, f"ipc://{folder}/p.sock"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        assert health(raw(f"ipc://{folder}/p.sock.control")).ready
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=DEADLINE_S)
        assert (out, process.returncode) == ("", 0), errors
    finally:
        process.kill()
        process.communicate()


def test_health_goes_red_when_a_step_does_not_end(serve, control, raw, engine):
    worker = serve(stalled_ms=100)
    client, user = control(worker), raw(worker)
    engine.gate.clear()
    request = user.generate("abc", max_tokens=2)
    wait_until(lambda: health(client).status == "stalled", "red")
    red = health(client)
    assert (red.ready, red.live) == (False, 1)
    assert red.stalled_ms > 100
    engine.gate.set()
    user.until_end(request)
    wait_until(lambda: health(client).ready, "green again")


def test_health_goes_red_when_a_prompt_is_not_prepared(serve, control, raw, engine):
    worker = serve(stalled_ms=100)
    client, user = control(worker), raw(worker)
    engine.text_gate.clear()
    user.generate("abc", max_tokens=2)
    wait_until(lambda: health(client).status == "stalled", "red")
    engine.text_gate.set()
    wait_until(lambda: health(client).ready, "green again")


def test_stats_account_for_every_request_of_a_script(serve, control, raw, engine):
    worker = serve(max_peer_requests=4)
    client, user = control(worker), raw(worker)
    for count in (1, 2, 3):
        user.until_end(user.generate(f"whole {count}", max_tokens=count))
    engine.gate.clear()
    running = [user.generate(f"running {i}", max_tokens=4000) for i in range(4)]
    refused = [user.generate("one too many"), user.send(wire.Generate(prompt="x", echo=True))]
    for request in refused:
        while (got := user.receive())[0] != request:
            pass
        assert isinstance(got[1], wire.Error)
    user.send(wire.Generate(prompt="again"), running[0])  # duplicate_id
    lost = raw(worker)
    lost.generate("lost", max_tokens=4000)
    wait_until(lambda: stats(client).requests == 11, "all have come")
    now = stats(client)
    assert (now.requests, now.live, now.peers) == (11, 5, 2)
    assert now.running + now.waiting + now.preparing == 5
    lost.close()
    wait_until(lambda: stats(client).abandoned == 1, "the lost client is seen")
    user.send(wire.Cancel(), running[0])
    engine.gate.set()
    assert user.until_end(running[0])[-1].reason == "cancelled"
    end = stats(client)
    assert end.ended == {"length": 3, "cancelled": 1}
    assert end.refused == {"queue_full": 1, "unsupported": 1, "duplicate_id": 1}
    assert end.requests == end.live + sum(end.ended.values()) + sum(end.refused.values()) + end.abandoned
    assert (end.live, end.dropped, end.errors) == (3, 0, {})
    assert end.resident_bytes > 2**20
    assert end.uptime_ms > 0


def test_models_are_told(serve, control, engine):
    (model,) = ask(control(serve()), wire.Models(), wire.ModelsReply).models
    assert (model.name, model.context, model.fingerprint) == ("fake", 4096, "fake/1")


def test_a_ping_is_answered_on_the_control_socket_too(serve, control):
    client = control(serve())
    request = client.send(wire.Ping(echo=[1, "two"]))
    got, pong = client.receive()
    assert (got, pong.echo, pong.live) == (request, [1, "two"], [])


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_every_message_gets_one_answer_on_the_control_socket(serve, raw, kind):
    client = raw(control_endpoint(serve().endpoint), kind)
    sent = [
        (wire.encode(b"12345678", wire.Stats()), wire.Result),
        (wire.encode(b"12345678", wire.Generate(prompt="x")), "unsupported"),
        (wire.encode(b"12345678", wire.Drain()), "unsupported"),
        ([b"MIRO1", b"\x0b", b"12345678", b"\x81\xa1a\x01"], "bad_field"),
        ([b"MIRO1", b"\x0b", b"12345678", b"\x93"], "bad_frame"),
        ([b"MIRO1", b"\x0b", b"12345678", b"\x80" + b"\0" * 5000], "too_large"),
        ([b"MIRO1", b"\x86", b"12345678", b"\x80"], "unknown_type"),
        ([b"MIRO2", b"\x0b", b"12345678", b"\x80"], "bad_version"),
        ([b"MIRO1", b"\x7f", b"12345678", b"\x80"], "unknown_type"),
        ([b"what"], "bad_version"),
    ]
    for frames, expected in sent:
        client.frames(*frames)
        _, reply = client.receive()
        if isinstance(expected, str):
            assert isinstance(reply, wire.Error)
            assert reply.code == expected
        else:
            assert isinstance(reply, expected)
    assert client.silent(0.05)


def test_the_data_socket_says_where_the_question_belongs(serve, raw):
    client = raw(serve())
    for body, place in ((wire.Stats(), "control"), (wire.Drain(), "admin")):
        client.send(body)
        _, error = client.receive()
        assert error.code == "unsupported"
        assert place in error.message


def test_drain_ends_the_worker_after_running_work(serve, raw, control, engine):
    worker = serve(grace_ms=60_000)
    user, admin, client = raw(worker), raw(admin_endpoint(worker.endpoint)), control(worker)
    engine.gate.clear()
    request = user.generate("abc", max_tokens=3)
    wait_until(lambda: stats(client).live == 1, "it is live")
    assert ask(admin, wire.Drain(), wire.DrainReply).live == 1
    wait_until(lambda: health(client).status == "draining", "health is red")
    assert user.until_end(user.generate("late"))[-1].code == "draining"
    engine.gate.set()
    while not isinstance((got := user.receive())[1], wire.End):
        pass
    assert (got[0], got[1].reason) == (request, "length")
    assert worker.join(DEADLINE_S)
    assert not os.path.exists(admin_endpoint(worker.endpoint).removeprefix("ipc://"))


def test_drain_takes_a_grace_time(serve, raw, engine):
    worker = serve(grace_ms=60_000)
    user, admin = raw(worker), raw(admin_endpoint(worker.endpoint))
    engine.step_seconds = 0.01
    request = user.generate("abc", max_tokens=4000)
    assert isinstance(user.receive()[1], wire.Accepted)
    ask(admin, wire.Drain(grace_ms=0), wire.DrainReply)
    end = user.until_end(request)[-1]
    assert (end.reason, end.code) == ("error", "restarted")
    assert worker.join(DEADLINE_S)


def test_only_the_owner_reaches_any_of_the_sockets(serve):
    endpoint = serve().endpoint
    for where in (endpoint, control_endpoint(endpoint), admin_endpoint(endpoint)):
        assert stat.S_IMODE(os.stat(where.removeprefix("ipc://")).st_mode) == 0o600


def test_a_flood_of_data_does_not_keep_health_waiting(serve, raw, control):
    worker = serve(messages_per_second=1_000_000)
    noise, client = raw(worker), control(worker)
    noise.socket.setsockopt(zmq.SNDHWM, 0)
    slowest = 0.0
    for _ in range(30):
        for _ in range(300):
            noise.send(wire.Ping())
        began = time.monotonic()
        assert health(client).ready in (True, False)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2.0


def test_a_flood_of_questions_that_nobody_reads_costs_only_its_sender(serve, raw, control, engine):
    worker = serve(messages_per_second=1_000_000, max_reply_bytes=20_000, send_hwm=8, slow_client_ms=200)
    deaf = raw(control_endpoint(worker.endpoint), RCVHWM=1)
    client, user = control(worker), raw(worker)
    for _ in range(3000):
        deaf.send(wire.Stats())
    assert user.until_end(user.generate("abc", max_tokens=3))[-1].reason == "length"
    wait_until(lambda: stats(client).dropped > 0, "what it does not take is dropped and counted")


def test_a_control_endpoint_that_cannot_be_bound_leaves_nothing_behind(folder, engine):
    (folder / "w.sock.control").write_text("mine")
    worker = Worker(engine, f"ipc://{folder}/w.sock", config=WorkerConfig())
    with pytest.raises(ConfigError, match=r"w\.sock\.control"):
        worker.start()
    assert (folder / "w.sock.control").read_text() == "mine"
    assert not (folder / "w.sock").exists()


def test_connections_stop_short_of_the_descriptors(serve, raw, control):
    """libzmq ends the process when a connection comes for which there is no descriptor."""
    worker = serve(max_connections=32)  # 24 for data, 4 each for control and admin
    client, user = control(worker), raw(worker)
    wait_until(lambda: health(client).ready, "it is ready")
    assert user.until_end(user.generate("abc", max_tokens=2))[-1].reason == "length"
    silent = []
    for endpoint in (worker.endpoint, control_endpoint(worker.endpoint)):
        for _ in range(60):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)  # EAGAIN: the backlog is full
            wait_until(lambda c=connection, e=endpoint: c.connect_ex(e[len("ipc://") :]) == 0, "it is connected")
            silent.append(connection)
    data, desk, _ = worker._sockets
    wait_until(lambda: data.refused >= 60 - 23 and len(data._connected) == 24, "data has its share")
    wait_until(lambda: desk.refused >= 60 - 3 and len(desk._connected) == 4, "control has its share")
    # Who was there before is served, and when the others are gone, newcomers are too.
    assert user.until_end(user.generate("abc", max_tokens=2))[-1].reason == "length"
    assert health(client).ready
    for connection in silent:
        connection.close()
    wait_until(lambda: len(worker._sockets[1]._connected) == 1, "they are gone")
    assert health(control(worker)).ready


def test_an_answer_that_cannot_be_sent_is_an_error(serve, control, engine):
    engine.describe = lambda: {"name": "\udcff", "context": 1, "fingerprint": "f"}
    client = control(serve())
    client.send(wire.Models())
    assert client.receive()[1].code == "internal"
    assert health(client).status in ("starting", "ok")
