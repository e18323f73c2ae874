"""The protocol as a client sees it: replies, refusals, REQ sockets."""

from __future__ import annotations

import os

import msgspec
import pytest
import zmq
from fake_engine import answer, ids_of

from miro_client import wire
from miro_client.errors import ContextOverflow, QueueFull

PING, GENERATE, CANCEL, CREDIT = b"\x0a", b"\x02", b"\x04", b"\x03"
ID = b"12345678"
EMPTY = b"\x80"


def body(**fields) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_a_stream_is_accepted_chunks_end(serve, raw):
    client = raw(serve())
    request = client.generate("hello", max_tokens=5, sampling={"seed": 99, "logprobs": 2})
    accepted, *chunks, end = client.until_end(request)
    text, tokens = answer(ids_of("hello"), 5)
    assert isinstance(accepted, wire.Accepted)
    assert wire.unpack_ids(accepted.tokens) == ids_of("hello")
    assert (accepted.seed, accepted.position, accepted.fingerprint) == (99, 5, "fake/1")
    assert [chunk.s for chunk in chunks] == list(range(len(chunks)))
    assert "".join(chunk.t for chunk in chunks) == text
    assert [token for chunk in chunks for token in wire.unpack_ids(chunk.k)] == tokens
    assert next(entry for chunk in chunks for entry in chunk.lp) == (-0.5, [(tokens[0], -0.5), (1, -2.0)])
    assert isinstance(end, wire.End)
    assert (end.reason, end.code, end.t) == ("length", None, None)
    assert (end.usage.prompt, end.usage.completion) == (5, 5)
    assert end.timing.queue_ms >= 1.0
    assert (end.timing.prefill_ms, end.timing.decode_ms) == (2.0, 3.0)
    assert client.silent()


def test_without_streaming_one_end_carries_everything(serve, raw):
    client = raw(serve())
    request = client.generate("hi", stream=False, max_tokens=3, logprobs=1)
    (end,) = client.until_end(request)
    text, tokens = answer(ids_of("hi"), 3)
    assert (end.t, wire.unpack_ids(end.k)) == (text, tokens)
    assert wire.unpack_ids(end.tokens) == ids_of("hi")
    assert (end.seed, end.fingerprint, len(end.lp)) == (1234, "fake/1", 3)


def test_tokens_and_messages_are_prompts_too(serve, raw):
    client = raw(serve())
    for fields, ids in (
        ({"tokens": wire.pack_ids([7, 8, 9])}, [7, 8, 9]),
        ({"messages": [wire.ChatMessage(role="user", content="x")]}, ids_of("user:x\n")),
    ):
        request = client.send(wire.Generate(stream=False, sampling={"max_tokens": 2}, **fields))
        (end,) = client.until_end(request)
        assert wire.unpack_ids(end.tokens) == ids
        assert end.t == answer(ids, 2)[0]


def test_no_tokens_asked_for_is_an_end_with_none(serve, raw):
    client = raw(serve())
    replies = client.until_end(client.generate(max_tokens=0))
    assert [type(reply) for reply in replies] == [wire.Accepted, wire.End]


def test_req_sockets_get_one_reply_with_their_delimiter(serve, raw):
    worker = serve()
    client = raw(worker, zmq.REQ)
    for message in (
        wire.Ping(echo="me"),
        wire.Hello(),
        wire.Generate(prompt="abc", sampling={"max_tokens": 2}),
        wire.Cancel(),
        wire.Credit(add=1),
        wire.Generate(prompt="abc", stream=True),
        wire.Generate(prompt="abc", n=2),
        wire.Generate(prompt="abc", sampling={"n": 64}),
    ):
        client.send(message, ID)
        got, reply = client.receive()
        expected = {
            wire.Ping: wire.Pong,
            wire.Hello: wire.Welcome,
            wire.Generate: wire.End,
            wire.Cancel: wire.Error,
            wire.Credit: wire.Error,
        }[type(message)]
        if isinstance(message, wire.Generate) and (message.stream or message.n or message.sampling.get("n")):
            assert isinstance(reply, wire.Error)
            assert (reply.code, reply.field) == ("unsupported", "stream" if message.stream else "n")
        else:
            assert isinstance(reply, expected)
        assert got == ID


def test_ping_and_hello(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    client.send(wire.Hello(minor=7, client="me", lang="x"))
    welcome = client.receive()[1]
    assert (welcome.model, welcome.context, welcome.minor) == ("fake", engine.context, wire.MINOR)
    assert welcome.limits.requests == worker.config.max_peer_requests
    engine.gate.clear()
    request = client.generate()
    assert isinstance(client.receive()[1], wire.Accepted)
    client.send(wire.Ping(echo=b"echo"))
    pong = client.receive()[1]  # while a step is stuck
    assert (pong.epoch, pong.echo, pong.live, pong.running) == (welcome.epoch, b"echo", [request], 1)
    engine.gate.set()
    client.until_end(request)
    client.send(wire.Ping())
    assert client.receive()[1].live == []


@pytest.mark.parametrize(
    ("frames", "code", "field", "echoed"),
    [
        ([], "bad_frame", None, False),
        ([b"MIRO1"], "bad_frame", None, False),
        ([b"MIRO2", PING, ID, EMPTY], "bad_version", None, True),
        ([b"GET / HTTP/1.1"], "bad_version", None, False),
        ([b"MIRO1", PING, ID], "bad_frame", None, False),
        ([b"MIRO1", PING, ID, EMPTY, b""], "bad_frame", None, False),
        ([b"MIRO1", PING, ID] + [b"x"] * 50, "bad_frame", None, False),
        ([b"MIRO1", b"", ID, EMPTY], "bad_frame", None, True),
        ([b"MIRO1", b"\x0a\x0a", ID, EMPTY], "bad_frame", None, True),
        ([b"MIRO1", PING, b"short", EMPTY], "bad_frame", None, False),
        ([b"MIRO1", PING, b"x" * 17, EMPTY], "bad_frame", None, False),
        ([b"MIRO1", b"\x77", ID, EMPTY], "unknown_type", None, True),
        ([b"MIRO1", b"\x85", ID, EMPTY], "unknown_type", None, True),
        ([b"MIRO1", b"\x05", ID, EMPTY], "unsupported", None, True),
        ([b"MIRO1", b"\x0b", ID, EMPTY], "unsupported", None, True),
        ([b"MIRO1", PING, ID, b""], "bad_frame", None, True),
        ([b"MIRO1", PING, ID, b"\x93\x01\x02\x03"], "bad_frame", None, True),
        ([b"MIRO1", PING, ID, b"\xdf\xff\xff\xff\xff"], "bad_frame", None, True),
        ([b"MIRO1", PING, ID, b"\x80\x80"], "bad_frame", None, True),
        ([b"MIRO1", PING, ID, b"\x81\xa4echo\xa2\xff\xfe"], "bad_frame", None, True),
        ([b"MIRO1", PING, ID, b"\x81\xa1y" + b"\x91" * 3000 + b"\xc0"], "bad_field", "y", True),
        ([b"MIRO1", PING, ID, body(echo="x" * 5000)], "too_large", None, True),
        ([b"MIRO1", GENERATE, ID, EMPTY], "bad_field", "prompt", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", tokens=b"1234")], "bad_field", "tokens", True),
        ([b"MIRO1", GENERATE, ID, body(tokens=b"123")], "bad_field", "tokens", True),
        ([b"MIRO1", GENERATE, ID, body(tokens=b"")], "bad_field", "tokens", True),
        ([b"MIRO1", GENERATE, ID, body(messages=[])], "bad_field", "messages", True),
        ([b"MIRO1", GENERATE, ID, body(messages=[{"role": "user"}])], "bad_field", "messages[0].content", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", colour=1)], "bad_field", "colour", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", stream=1)], "bad_field", "stream", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", credit=4)], "bad_field", "credit", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", n=2, sampling={"n": 3})], "bad_field", "n", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", echo=True)], "unsupported", "echo", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", sampling={"temperature": 9})], "bad_field", "temperature", True),
        (
            [b"MIRO1", GENERATE, ID, body(prompt="a", sampling={"top_p": float("nan")})],
            "bad_field",
            "top_p",
            True,
        ),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", sampling={"wit": 1})], "bad_field", "wit", True),
        ([b"MIRO1", GENERATE, ID, body(prompt="a", sampling={"stop": {"a": 1}})], "bad_field", "stop", True),
        (
            [b"MIRO1", GENERATE, ID, body(prompt="a", logprobs=1, sampling={"logprobs": 2})],
            "bad_field",
            "logprobs",
            True,
        ),
        ([b"MIRO1", CREDIT, ID, body(add=0)], "bad_field", "add", True),
        ([b"MIRO1", CREDIT, ID, body(add=1)], "unknown_request", None, True),
        ([b"MIRO1", CANCEL, ID, EMPTY], "unknown_request", None, True),
    ],
)
def test_what_is_wrong_gets_a_typed_error(serve, raw, frames, code, field, echoed):
    client = raw(serve())
    client.frames(*frames) if frames else client.frames(b"")
    got, error = client.receive()
    assert isinstance(error, wire.Error)
    assert (error.code, error.field) == (code, field)
    assert got == (ID if echoed else b"")
    assert error.supported == ([1] if code == "bad_version" else None)
    assert client.silent(0.05)
    client.send(wire.Ping())
    assert isinstance(client.receive()[1], wire.Pong)


#: What an extension key may hold: anything, of no type that another key has, and deeper than Python recurses.
EXTENSIONS = [
    b"\x81\xa1a\x01", b"\xc4\x02ab", b"\xc7\x02\x05ab", b"\xd4\x05a", b"\xd6\xff\x00\x00\x00\x01",
    b"\x91\xcb" + b"\0" * 8, b"\x91\xc0", b"\x91\x91\x01",
    b"\xdc\x08\x00" + b"\x01" * 2048, b"\x81\xc0\x01", b"\x91" * 2000 + b"\xc0",
    b"\x81\xa1k" * 1200 + b"\xc3", b"\xa1y",
]  # fmt: skip


@pytest.mark.parametrize("value", EXTENSIONS, ids=range(len(EXTENSIONS)))
def test_extension_keys_are_ignored(serve, raw, value):
    """In the body, in `sampling`, in both, and beside what is wrong: that is refused as it would be without them."""
    client = raw(serve())
    mine, sampling = b"\xa6x_mine" + value, b"\xa8sampling"
    length, bad = b"\xaamax_tokens\x01", b"\xa1n\x91\xc0"
    for body_, field in (
        (b"\x83\xa6prompt\xa1a" + mine + sampling + b"\x81" + length, None),
        (b"\x82\xa6prompt\xa1a" + sampling + b"\x82" + mine + length, None),
        (b"\x83" + mine + b"\xa6prompt\xa1a" + sampling + b"\x82" + length + mine, None),
        (b"\x83" + mine + b"\xa6prompt\xa1a" + sampling + b"\x82" + mine + bad, "n"),
        (b"\x83\xa6prompt\xc0" + mine + sampling + b"\x82" + mine + length, "prompt"),
    ):
        client.frames(b"MIRO1", GENERATE, ID, body_)
        reply = client.until_end(ID)[-1]
        assert (reply.field if field else reply.reason) == (field or "length")
    client.frames(b"MIRO1", PING, ID, b"\x82" + mine + b"\xa4echo\x05")
    assert client.receive()[1].echo == 5


def test_extension_keys_do_not_count(serve, raw):
    client = raw(serve())
    extensions = {f"x_{i}": [None] for i in range(wire.MAX_SAMPLING_KEYS)}
    client.frames(b"MIRO1", GENERATE, ID, body(prompt="a", sampling={"max_tokens": 1, **extensions}))
    assert client.until_end(ID)[-1].reason == "length"


def test_a_duplicate_id_leaves_the_live_request_alone(serve, raw, engine):
    client = raw(serve())
    engine.gate.clear()
    request = client.generate("abc", max_tokens=3)
    assert isinstance(client.receive()[1], wire.Accepted)
    for message in (wire.Generate(prompt="other", stream=True), wire.Ping()):
        client.send(message, request)
        got, error = client.receive()
        assert (got, error.code, error.field) == (b"", "duplicate_id", request.hex())
    client.frames(b"MIRO1", CREDIT, request, body(add=-1))
    got, error = client.receive()
    assert (got, error.code) == (b"", "bad_field")
    engine.gate.set()
    *chunks, end = client.until_end(request)
    assert ("".join(chunk.t for chunk in chunks), end.reason) == (answer(ids_of("abc"), 3)[0], "length")
    again = client.generate("abc", request, max_tokens=1)  # free again
    assert client.until_end(again)[-1].reason == "length"


def test_refusals_before_acceptance_are_errors(serve, raw, engine):
    client = raw(serve())
    assert client.until_end(client.generate(max_tokens=5000))[0].code == "context_overflow"
    engine.prepare_errors.append(ZeroDivisionError("secret path"))
    (error,) = client.until_end(client.generate())
    assert error.code == "internal"
    assert "secret" not in error.message
    engine.add_errors.append(QueueFull("full", retry_after_ms=77))
    (error,) = client.until_end(client.generate())
    assert (error.code, error.retry_after_ms) == ("queue_full", 77)
    engine.prepare_errors.append(ContextOverflow("too long", field="prompt"))
    (error,) = client.until_end(client.generate(stream=False))
    assert (error.code, error.field, error.message) == ("context_overflow", "prompt", "too long")


def test_cancel_in_every_state(serve, raw, engine):
    client = raw(serve())
    engine.text_gate.clear()
    queued = client.generate()
    client.send(wire.Cancel(), queued)
    (end,) = client.until_end(queued)
    assert end.reason == "cancelled"
    engine.text_gate.set()

    engine.step_seconds = 0.005
    running = client.generate(max_tokens=4000)
    assert isinstance(client.receive()[1], wire.Accepted)
    client.send(wire.Cancel(), running)
    client.send(wire.Cancel(), running)
    *_, end = client.until_end(running)
    assert end.reason == "cancelled"
    assert end.usage.prompt == 3

    client.send(wire.Cancel(), running)  # finished: no answer
    assert client.silent()
    client.send(wire.Cancel(), os.urandom(8))
    assert client.receive()[1].code == "unknown_request"
    assert engine.added == [ids_of("abc")]
    assert not engine.has_work
