"""What the engine takes as messages a worker takes too, and refuses the same, by the same name."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from miro_client import Client, wire
from miro_client.errors import BadField, ContextOverflow
from miro_cy.text.messages import MAX_DEPTH, MAX_MESSAGES, MAX_ROLE_CHARS, MAX_VALUES, check_messages

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [True, None, 1.5, "é"], "c": {}}}}
PARTS = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
GENERATE = b"\x02"
ID = b"12345678"


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


SOUND: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": PARTS, "name": "Ann"}],
    [{"role": "user", "content": "2+3?"}, {"role": "assistant", "tool_calls": [CALL, CALL]}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "5", "name": None}],
    [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "5", "tool_call_id": "1"}],
    [{"role": "assistant", "content": "x", "tool_calls": None, "reasoning": "because"}],
    [{"role": "assistant", "content": "x", "thinking": "é", "reasoning_content": "y"}],
    [{"role": "assistant", "tool_calls": [{"big": 2**64 - 1, "small": -(2**63), "deep": nested(MAX_DEPTH - 1)}]}],
    [{"role": "assistant", "tool_calls": [{"a": [0] * (MAX_VALUES // 2)}]}, {"role": "user", "content": "x"}],
    [{"role": "x" * MAX_ROLE_CHARS, "content": "x"}] * MAX_MESSAGES,
]
#: What is wrong, and the field that says so; a place below it may be named too.
WRONG: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    (["hello"], "messages[0]"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x"}, {"role": "", "content": "x"}], "messages[1].role"),
    ([{"role": "x" * (MAX_ROLE_CHARS + 1), "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
    ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
    ([{"role": "tool", "content": "x", "tool_call_id": [1]}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "x", "reasoning": {}}], "messages[0].reasoning"),
    ([{"role": "user", "content": "x", "reasoning_content": 1}], "messages[0].reasoning_content"),
    ([{"role": "user", "content": "x", "thinking": True}], "messages[0].thinking"),
    ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [*PARTS, {"type": "text"}]}], "messages[0].content[2]"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content"),
    ([{"role": "user", "content": "x"}, {"role": "a", "tool_calls": "x"}], "messages[1].tool_calls"),
    ([{"role": "a", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
    ([{"role": "a", "tool_calls": [1]}], "messages[0].tool_calls"),
    ([{"role": "a", "tool_calls": [{1: 2}]}], "messages[0].tool_calls"),
    ([{"role": "a", "tool_calls": [{"a": b"bytes"}]}], "messages[0].tool_calls"),
    ([{"role": "a", "tool_calls": [{"a": nested(MAX_DEPTH)}]}], "messages[0].tool_calls"),
    ([{"role": "a", "tool_calls": [{"a": [0] * MAX_VALUES}]}], "messages[0].tool_calls"),
    ([{"role": "a", "tool_calls": [{"a": [0] * (MAX_VALUES * 2 // 3)}]}] * 2, "messages[1].tool_calls"),
    ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "messages"),
]


@pytest.mark.parametrize("at", range(len(SOUND)))
def test_what_the_engine_takes_reaches_it(serve, raw, engine, at):
    worker, messages = serve(), SOUND[at]
    client = raw(worker)
    client.frames(b"MIRO1", GENERATE, ID, msgspec.msgpack.encode({"messages": messages, "sampling": {"max_tokens": 1}}))
    client.until_end(ID)
    # The longest do not fit the fake's context; what counts is what it was asked.
    with Client(worker.endpoint, timeout=15) as other, contextlib.suppress(ContextOverflow):
        other.complete(messages=messages, max_tokens=1)
    assert len(engine.prepared) == 2
    for prompt in engine.prepared:
        assert check_messages(prompt["messages"]) == check_messages(messages)


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_what_the_engine_refuses_a_worker_refuses_by_the_same_name(serve, raw, at):
    messages, field = WRONG[at]
    with pytest.raises(BadField) as caught:
        check_messages(messages)
    assert str(caught.value.field).startswith(field)
    client = raw(serve())
    client.frames(b"MIRO1", GENERATE, ID, msgspec.msgpack.encode({"messages": messages}))
    (error,) = client.until_end(ID)
    assert (error.code, str(error.field)[: len(field)]) == ("bad_field", field)
    assert len(error.message) < 400
    client.send(wire.Ping())
    assert isinstance(client.receive()[1], wire.Pong)


def message_with(key: str, encoded: bytes) -> bytes:
    """A GENERATE body with one message, of which one value is these bytes."""
    head = msgspec.msgpack.encode({"messages": [{"role": "assistant", key: None}]})
    assert head.endswith(b"\xc0")
    return head[:-1] + encoded


def array(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize("key", ["content", "tool_calls"])
@pytest.mark.parametrize(
    "encoded",
    [
        array(4_000_000, b"\x80"),  # half a gigabyte, were they made
        array(4_000_000, b"\xc0"),
        array(200_000, b"\x81\xa1a\x91\xc0"),
        b"\x91" * 900 + b"\xc0",
        b"\x91\x81\xa1a" * 300 + b"\xc0",
        b"\x91\x81\xa1a\xa2\xff\xfe",  # not UTF-8
        b"\x91\x81\xa1a\xd4\x01\x00",  # an extension type
        b"\x91\x81\xa2\xff\xfe\xc0",
        b"\xc4\x02ab",
        array(240_000, b"\x82\xa4type\xa4text\xa4text\xa0"),
        b"\x05",
    ],
    ids=range(11),
)
def test_promise_bounded_messages(serve, raw, key, encoded):
    """Promise 4: refused before memory is taken for what they hold, and nobody waits for it."""
    worker = serve()
    client, other = raw(worker), raw(worker)
    running = other.generate("abc", max_tokens=3)
    client.frames(b"MIRO1", GENERATE, ID, message_with(key, encoded))
    (error,) = client.until_end(ID)
    assert (error.code, error.field) == ("bad_field", f"messages[0].{key}")
    assert other.until_end(running)[-1].reason == "length"


def test_tool_calls_nested_past_any_stack_are_a_bad_frame(serve, raw):
    client = raw(serve())
    client.frames(b"MIRO1", GENERATE, ID, message_with("tool_calls", b"\x91" * 100_000 + b"\xc0"))
    (error,) = client.until_end(ID)
    assert error.code == "bad_frame"
    client.send(wire.Ping())
    assert isinstance(client.receive()[1], wire.Pong)


def test_prompts_that_wait_count_all_that_a_message_holds(serve, raw, engine):
    """Tool calls and parts of content are bytes of a waiting prompt as its text is."""
    big = "x" * 1000
    for message in (
        {"role": "a", "tool_calls": [{"a": big}]},
        {"role": "a", "content": [{"type": "text", "text": big}]},
        {"role": "a", "content": "", "reasoning": big},
    ):
        client = raw(serve(max_peer_prompt_bytes=1500))
        engine.text_gate.clear()
        body = msgspec.msgpack.encode({"messages": [message]})
        client.frames(b"MIRO1", GENERATE, b"first..1", body)
        client.frames(b"MIRO1", GENERATE, b"second.2", body)
        got, error = client.receive()
        assert (got, error.code) == (b"second.2", "queue_full")
        engine.text_gate.set()
        assert client.until_end(b"first..1")[-1].reason == "length"


def test_messages_are_encoded_as_specified():
    messages = [
        wire.ChatMessage(role="user", content="hi"),
        wire.ChatMessage(role="assistant", tool_calls=[{"a": 1}]),
        wire.ChatMessage(role="user", content=[{"type": "text", "text": "x"}]),
    ]
    frames = wire.encode(ID, wire.Generate(messages=messages))
    assert frames[3] == (
        b"\x81\xa8messages\x93"
        b"\x82\xa4role\xa4user\xa7content\xa2hi"
        b"\x82\xa4role\xa9assistant\xaatool_calls\x91\x81\xa1a\x01"
        b"\x82\xa4role\xa4user\xa7content\x91\x82\xa4type\xa4text\xa4text\xa1x"
    )
    decoded = wire.decode_request(wire.Kind.GENERATE, frames[3])
    assert isinstance(decoded, wire.Generate)
    assert [message.role for message in decoded.messages or ()] == ["user", "assistant", "user"]
    assert bytes((decoded.messages or [])[1].tool_calls) == b"\x91\x81\xa1a\x01"


def test_wire_and_engine_agree_on_limits():
    assert wire.MAX_MESSAGES == MAX_MESSAGES
