"""Many clients at once: none hurts another, and what a lost one asked for is given back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import msgspec
import pytest
import zmq
from fake_engine import FakeEngine, answer, ids_of
from raw_client import DEADLINE_S, Raw, text_of, wait_until

from miro_client import wire

HOLDER = """
import sys
from miro_client import Client
client = Client(sys.argv[1])
streams = [client.generate(f"victim {i}", max_tokens=4000) for i in range(3)]
for stream in streams:
    next(stream)
print("streaming", flush=True)
while True:
    for stream in streams:
        next(stream)
"""


def refusal(client: Raw) -> tuple[bytes, wire.Error]:
    """The next ERROR; what comes before it is dropped."""
    while not isinstance((got := client.receive())[1], wire.Error):
        pass
    return got


def rest(engine: FakeEngine) -> None:
    wait_until(lambda: not engine.has_work, "the engine is at rest")


def test_promise_one_terminal_reply_among_sixteen_clients(serve, raw, engine):
    engine.step_seconds = 0.001
    worker = serve()
    command = [sys.executable, "-c", HOLDER, worker.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        try:
            assert victim.stdout.readline() == "streaming\n"
            problems: list[str] = []

            def one(number: int, client: Raw) -> None:
                prompt, count = f"client {number}", 20 + number
                cancelled = number % 4 == 0
                request = client.generate(prompt, max_tokens=4000 if cancelled else count)
                if cancelled:
                    client.receive()
                    client.receive()
                    client.send(wire.Cancel(), request)
                replies = client.until_end(request)
                end = replies[-1]
                if cancelled and end.reason != "cancelled":
                    problems.append(f"{number}: {end}")
                if not cancelled and (end.reason, text_of(replies)) != ("length", answer(ids_of(prompt), count)[0]):
                    problems.append(f"{number}: {end} {text_of(replies)!r}")
                if not client.silent(0.05):
                    problems.append(f"{number}: more than one terminal reply")

            threads = [threading.Thread(target=one, args=(i, raw(worker))) for i in range(16)]
            for thread in threads[:8]:
                thread.start()
            victim.send_signal(signal.SIGKILL)
            for thread in threads[8:]:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
            assert problems == []
        finally:
            victim.kill()
    rest(engine)


def test_a_vanished_client_is_cancelled_in_every_state(serve, raw, engine):
    worker = serve()
    engine.text_gate.clear()
    lost = raw(worker)
    lost.generate("queued", max_tokens=4000)
    wait_until(lambda: engine.prepared, "the prompt is with the text thread")
    lost.close()
    wait_until(lambda: len(worker._io._sessions) == 0, "the worker saw the connection end")
    engine.text_gate.set()
    lost = raw(worker)
    lost.generate("running", max_tokens=4000)
    lost.generate("whole", max_tokens=4000, stream=False)
    assert isinstance(lost.receive()[1], wire.Accepted)
    wait_until(lambda: len(engine.added) == 2, "both run")
    lost.close()
    rest(engine)
    assert engine.added == [ids_of("running"), ids_of("whole")]


def test_a_new_connection_under_an_old_id_gets_nothing_of_it(serve, raw, engine):
    worker = serve()
    for _ in range(20):
        engine.gate.clear()
        # libzmq ignores a connection whose id is still taken.
        while (victim := raw(worker, ROUTING_ID=b"same")).generate("secret", max_tokens=50) and victim.silent():
            victim.close()
        assert isinstance(victim.receive()[1], wire.Accepted)
        victim.close()
        thief = raw(worker, ROUTING_ID=b"same")
        ping = thief.send(wire.Ping())
        engine.gate.set()
        # It may hear nothing at all, for the same reason.
        while not thief.silent(0.03):
            got, pong = thief.receive()
            assert (got, pong.live) == (ping, [])
        thief.close()
        rest(engine)


@pytest.mark.parametrize("length", [1, 127, 255])
def test_a_routing_id_of_any_length_is_served(serve, raw, length):
    client = raw(serve(), ROUTING_ID=b"A" * length)
    client.generate("hello", max_tokens=1)
    assert isinstance(client.receive()[1], wire.Accepted)


def test_a_second_connection_with_a_live_id_cannot_take_over(serve, raw, engine):
    worker = serve()
    first = raw(worker, ROUTING_ID=b"same")
    engine.gate.clear()
    request = first.generate("mine", max_tokens=30)
    assert isinstance(first.receive()[1], wire.Accepted)
    second = raw(worker, ROUTING_ID=b"same")
    for _ in range(5):
        second.send(wire.Ping())
    second.send(wire.Cancel(), request)
    engine.gate.set()
    replies = first.until_end(request)
    assert (text_of(replies), replies[-1].reason) == (answer(ids_of("mine"), 30)[0], "length")
    while not second.silent(0.05):
        frames = second.socket.recv_multipart()
        assert request not in frames


def test_garbage_hurts_nobody(serve, raw, engine):
    worker = serve(messages_per_second=100_000)
    noise, good = raw(worker), raw(worker)
    draw = random.Random(5)
    engine.step_seconds = 0.001
    request = good.generate("calm", max_tokens=60)
    parts = [b"", b"MIRO1", b"\x02", b"\x0a", os.urandom(8), b"\x80", b"\x81\xa6prompt\xa1a"]
    sent = 0
    for _ in range(400):
        frames = [draw.choice([*parts, draw.randbytes(draw.randrange(30))]) for _ in range(draw.randrange(1, 7))]
        noise.frames(*frames)
        sent += 1
    valid = wire.encode(ID, wire.Generate(prompt="p", sampling={"max_tokens": 1}))[3]
    for _ in range(400):
        mutant = bytearray(valid)
        for _ in range(draw.randrange(1, 4)):
            mutant[draw.randrange(len(mutant))] = draw.randrange(256)
        noise.frames(b"MIRO1", b"\x02", draw.randbytes(8), bytes(mutant))
        sent += 1
    replies = good.until_end(request)
    assert text_of(replies) == answer(ids_of("calm"), 60)[0]
    answers = 0
    while answers < sent:  # one terminal reply for each, even to nonsense
        assert noise.socket.poll(DEADLINE_S * 1000), f"{answers} of {sent} answered"
        frames = noise.socket.recv_multipart()
        frames = frames[1:] if not frames[0] else frames
        answers += wire.decode_reply(frames)[1].__class__ in (wire.Error, wire.End, wire.Pong)
    assert noise.silent()


ID = b"12345678"


def test_an_oversized_frame_costs_only_its_sender(serve, raw):
    worker = serve(max_message_bytes=10_000)
    loud, good = raw(worker), raw(worker)
    loud.frames(b"MIRO1", b"\x02", ID, msgspec.msgpack.encode({"prompt": "x" * 20_000}))
    assert loud.silent()
    assert good.until_end(good.generate())[-1].reason == "length"


def test_a_pickle_is_only_bytes(serve, raw, folder):
    bomb = b"cos\nsystem\n(S'touch " + str(folder / "owned").encode() + b"'\ntR."
    client = raw(serve())
    client.frames(bomb)
    assert client.receive()[1].code == "bad_version"
    client.frames(b"MIRO1", b"\x02", ID, bomb)
    assert client.receive()[1].code == "bad_frame"
    assert not (folder / "owned").exists()


def test_limits_of_one_peer_do_not_bind_another(serve, raw, engine):
    worker = serve(max_peer_requests=3, max_requests=5, retry_after_ms=321)
    engine.gate.clear()
    greedy, modest = raw(worker), raw(worker)
    requests = [greedy.generate(f"g{i}") for i in range(4)]
    got, refused = refusal(greedy)
    assert (got, refused.code, refused.retry_after_ms) == (requests[3], "queue_full", 321)
    for number in range(2):
        modest.generate(f"m{number}")
    last = modest.generate("m2")
    got, refused = refusal(modest)
    assert (got, refused.code) == (last, "queue_full")  # all of the worker's places are taken
    engine.gate.set()
    for request in requests[:3]:
        assert greedy.until_end(request)[-1].reason == "length"


def test_prompts_that_wait_are_bounded_in_bytes(serve, raw, engine):
    worker = serve(max_peer_prompt_bytes=1000, max_prompt_bytes=1500)
    engine.text_gate.clear()
    first, second = raw(worker), raw(worker)
    kept = first.generate("a" * 900)
    first.generate("b" * 200)
    assert first.receive()[1].code == "queue_full"
    second.generate("c" * 700)
    assert second.receive()[1].code == "queue_full"
    first.send(wire.Cancel(), kept)
    assert first.until_end(kept)[-1].reason == "cancelled"
    third = second.generate("c" * 700)  # there is room again
    engine.text_gate.set()
    assert second.until_end(third)[-1].reason == "length"


def test_a_flood_is_rate_limited_but_credit_and_cancel_pass(serve, raw, engine):
    client = raw(serve(messages_per_second=1))
    engine.step_seconds = 0.005  # so that it is not through before the CANCEL
    request = client.generate("abc", max_tokens=4000)
    assert isinstance(client.receive()[1], wire.Accepted)
    for _ in range(20):
        client.send(wire.Ping())
    replies = []
    while len(replies) < 20:
        if not isinstance(reply := client.receive()[1], wire.Chunk):
            replies.append(reply)
    assert isinstance(replies[0], wire.Pong)
    errors = [reply for reply in replies if isinstance(reply, wire.Error)]
    assert errors
    assert {error.code for error in errors} == {"rate_limited"}
    assert all(error.retry_after_ms > 0 for error in errors)
    client.send(wire.Cancel(), request)
    assert client.until_end(request)[-1].reason == "cancelled"


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_connections_come_and_go(serve, raw, engine, kind):
    worker = serve()
    for number in range(60):
        client = raw(worker, kind)
        client.generate(f"{number}", stream=False, max_tokens=2)
        if number % 3:
            assert client.receive()[1].t == answer(ids_of(f"{number}"), 2)[0]
        client.close()
    rest(engine)
    client = raw(worker)
    client.send(wire.Ping())
    assert client.receive()[1].running == 0
