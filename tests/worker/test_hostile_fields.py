"""Every field of every request, of wrong type, not a number, out of range, too long: an error that names it.

The tables are held against the definitions: a new field without hostile values fails the tests.
"""

from __future__ import annotations

import runpy
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miro_client import wire
from miro_client.endpoint import admin_endpoint, control_endpoint
from miro_cy import SamplingParams

BAD = runpy.run_path(str(Path(__file__).parents[1] / "bad_sampling.py"))["BAD"]
NAN, INF = float("nan"), float("inf")
NO_TEXT = [5, 1.5, True, b"x", [], {}, NAN]
NO_INTEGER = ["5", b"5", 1.5, NAN, INF, True, [1], {}]
NO_FLAG = [0, 1, "true", NAN, [], {}]
#: nested lists, as deep as msgpack is read
DEEP = msgspec.Raw(b"\x91" * 200 + b"\xc0")
UNSUPPORTED = "unsupported"

#: (body, field) -> values that are refused with bad_field, or with the code that stands beside one.
HOSTILE: dict[tuple[type[msgspec.Struct], str], list[Any]] = {
    (wire.Hello, "minor"): [*NO_INTEGER, None, -1, 2**31, 2**64 - 1, DEEP],
    (wire.Hello, "client"): [*NO_TEXT, None, "x" * 257, DEEP],
    (wire.Hello, "lang"): [*NO_TEXT, None, "x" * 65, DEEP],
    (wire.Credit, "add"): [*NO_INTEGER, None, 0, -1, wire.MAX_CREDIT + 1, 2**64 - 1, DEEP],
    (wire.Ping, "echo"): [DEEP, msgspec.Raw(b"\x91" * 33 + b"\xc0"), msgspec.Raw(b"\x91" * 2000 + b"\xc0")],
    (wire.Drain, "grace_ms"): [*NO_INTEGER, -1, 2**31, 2**64 - 1, DEEP],
    (wire.Generate, "prompt"): [*NO_TEXT, DEEP],
    (wire.Generate, "tokens"): [
        "1234", 5, 1.5, True, NAN, [1, 2], {}, b"", b"12345", DEEP,
        wire.pack_ids([-1]), wire.pack_ids([1, 10**6]), wire.pack_ids([2**31 - 1]),
    ],
    (wire.Generate, "messages"): [
        "hello", b"x", 5, NAN, True, {}, [], [5], ["x"], [None], [[]], DEEP,
        [{"role": "a", "content": msgspec.Raw(b"\x91" * 2000 + b"\xc0")}],
        [{"role": "a", "content": "x"}] * (wire.MAX_MESSAGES + 1),
    ],
    (wire.Generate, "sampling"): ["x", b"x", 5, NAN, True, None, [], [1], DEEP, {str(i): 1 for i in range(65)}],
    (wire.Generate, "n"): [*NO_INTEGER, None, 0, -1, 65, 2**63, 2**64 - 1, -(2**63), DEEP],
    (wire.Generate, "stream"): [*NO_FLAG, None, 2.5],
    (wire.Generate, "credit"): [*NO_INTEGER, 0, -1, wire.MAX_CREDIT + 1, 1],  # 1: without stream
    (wire.Generate, "queue_ms"): [*NO_INTEGER, 0, -1, 2**53 + 1],
    (wire.Generate, "deadline_ms"): [*NO_INTEGER, 0, -1, 2**53 + 1],
    (wire.Generate, "priority"): [*NO_INTEGER, None, -101, 101, 2**31],
    (wire.Generate, "logprobs"): [*NO_INTEGER, -1, 129, 2**64 - 1],
    (wire.Generate, "echo"): [*NO_FLAG, None, (True, UNSUPPORTED)],
    (wire.Generate, "resume"): [
        "x", b"x", 5, NAN, True, [], {"a": "x"}, {"a": 1.5}, {"a": None}, {"a": [1]}, {1: 1},
        ({}, UNSUPPORTED), ({"choice": 0}, UNSUPPORTED),
    ],
    (wire.ChatMessage, "role"): [*NO_TEXT, None, "", "x" * 65],
    (wire.ChatMessage, "content"): [
        5, 1.5, True, b"x", NAN, {}, None, ["x"], [None], [[]], DEEP, [{}], [{"type": "text"}], [{"text": "x"}],
        [{"type": "image_url", "text": "x"}], [{"type": 5, "text": "x"}], [{"type": "text", "text": 5}],
        [{"type": "text", "text": "x", "more": 1}], [{"type": "text", "text": "x"}] * 100_000,
    ],
    (wire.ChatMessage, "name"): [*NO_TEXT, DEEP],
    (wire.ChatMessage, "tool_calls"): [
        5, 1.5, True, b"x", {}, NAN, "x", [1], ["x"], [None], [[]], [{1: 2}], [{"a": b"x"}], DEEP,
    ],
    (wire.ChatMessage, "tool_call_id"): [*NO_TEXT, DEEP],
    (wire.ChatMessage, "reasoning_content"): [*NO_TEXT, DEEP],
    (wire.ChatMessage, "reasoning"): [*NO_TEXT, DEEP],
    (wire.ChatMessage, "thinking"): [*NO_TEXT, DEEP],
}  # fmt: skip
#: What else makes the body sound, and where the struct stands in it.
AROUND: dict[type[msgspec.Struct], dict[str, Any]] = {
    wire.Generate: {"sampling": {"max_tokens": 1}},
    wire.ChatMessage: {"role": "user", "content": "x"},
}
PLACES = {wire.ChatMessage: "messages[1]."}
KINDS = {
    wire.Hello: wire.Kind.HELLO, wire.Credit: wire.Kind.CREDIT, wire.Cancel: wire.Kind.CANCEL,
    wire.Ping: wire.Kind.PING, wire.Stats: wire.Kind.STATS, wire.Health: wire.Kind.HEALTH,
    wire.Models: wire.Kind.MODELS, wire.Drain: wire.Kind.DRAIN,
}  # fmt: skip
#: What the data socket does not take; the admin socket takes all of it.
ADMIN = (wire.Kind.STATS, wire.Kind.HEALTH, wire.Kind.MODELS, wire.Kind.DRAIN)


def structs() -> Iterator[type[msgspec.Struct]]:
    """Every struct that a request may hold."""
    waiting: list[Any] = list(typing.get_args(wire.Request))
    seen: set[Any] = set()
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen.add(kind)
            yield kind
            waiting += typing.get_type_hints(kind).values()
        waiting += typing.get_args(kind)


def body_of(kind: type[msgspec.Struct], name: str, value: Any) -> dict[str, Any]:
    """A body that is sound but for that field."""
    fields = {**AROUND.get(kind, {}), name: value}
    if kind in PLACES:
        return {"messages": [AROUND[wire.ChatMessage], fields], "stream": True}
    if kind is wire.Generate and name not in ("prompt", "tokens", "messages"):
        fields["prompt"] = "abc"
    return fields


@pytest.fixture
def service(serve, raw):
    """A client for each type of message, of a worker that is asked often."""
    worker = serve(messages_per_second=100_000)
    data, admin = raw(worker), raw(admin_endpoint(worker.endpoint))
    return lambda kind: admin if kind in ADMIN else data


def refuse(service: Callable[[wire.Kind], Any], kind: wire.Kind, body: dict[str, Any]) -> wire.Error:
    """The one ERROR that the body gets; the worker goes on."""
    client = service(kind)
    request_id = b"%08d" % next(NUMBERS)
    client.frames(b"MIRO1", bytes([kind]), request_id, msgspec.msgpack.encode(body))
    got, error = client.receive()
    assert got == request_id
    assert isinstance(error, wire.Error), f"{kind.name} {body!r:.200} gave {error!r:.200}"
    assert 10 < len(error.message) < 400
    client.send(wire.Ping(echo=request_id))
    pong = client.receive()[1]
    assert isinstance(pong, wire.Pong)
    assert (pong.echo, pong.live) == (request_id, [])
    return error


NUMBERS = iter(range(10**8))


def test_every_field_of_every_request_has_hostile_values():
    defined = {(kind, field.encode_name) for kind in structs() for field in msgspec.structs.fields(kind)}
    assert set(HOSTILE) == defined
    assert {field.name for field in fields(SamplingParams)} == set(BAD)
    assert all(HOSTILE.values())


@pytest.mark.parametrize(("kind", "name"), HOSTILE, ids=lambda part: getattr(part, "__name__", part))
def test_a_hostile_field_is_named(service, kind, name):
    for value in HOSTILE[kind, name]:
        value, code = value if isinstance(value, tuple) else (value, "bad_field")
        error = refuse(service, KINDS.get(kind, wire.Kind.GENERATE), body_of(kind, name, value))
        field = PLACES.get(kind, "") + name
        told = str(error.field)
        assert error.code == code, f"{value!r:.80}: {error}"
        # Of a list, the place in it may be named too.
        assert told == field or told.startswith((f"{field}[", f"{field}.")), f"{value!r:.80}: {error}"


@pytest.mark.parametrize("socket", [str, control_endpoint, admin_endpoint])
def test_an_echo_nests_to_one_limit_on_all_sockets(serve, raw, socket):
    """Whatever nests, and just where Python's limit on recursion lies, which decoding and encoding meet apart."""
    worker = serve(messages_per_second=100_000)
    client = raw(socket(worker.endpoint))
    limit = wire.MAX_ECHO_DEPTH
    nests = (b"\x91", b"\xc0"), (b"\x81\xa1k", b"\x05"), (b"\x92\x01", b"\x02"), (b"\x91", b"\x80")
    for level, end in nests:
        within = limit - (end == b"\x80")
        for depth in (0, 1, within, within + 1, 200, *range(960, 1001, 4), *range(984, 994)):
            echo = level * depth + end
            client.frames(b"MIRO1", bytes([wire.Kind.PING]), b"12345678", b"\x81\xa4echo" + echo)
            _, reply = client.receive()
            if depth <= within:
                assert msgspec.msgpack.encode(reply.echo) == echo
            else:
                assert (reply.code, reply.field) == ("bad_field", "echo"), f"{depth}: {reply}"
                assert str(limit) in reply.message
    key = b"\x81" + b"\x91" * limit + b"\x01\x02"  # a list that is a key
    client.frames(b"MIRO1", bytes([wire.Kind.PING]), b"12345678", b"\x81\xa4echo" + key)
    assert client.receive()[1].field == "echo"


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_sampling_parameter_is_named(service, name):
    sent = 0
    for value in BAD[name]:
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, ValueError):
            continue  # a value that no client can send
        sent += 1
        for sampling in ({name: value}, {"max_tokens": 1, "x_mine": 1, name: value}):
            error = refuse(service, wire.Kind.GENERATE, {"prompt": "abc", "sampling": sampling})
            assert (error.code, error.field) == ("bad_field", name), f"{value!r:.80}: {error}"
    assert sent > 3


@pytest.mark.parametrize("name", wire.ALSO_SAMPLING)
def test_a_field_that_is_a_sampling_parameter_takes_what_that_takes(service, raw, serve, name):
    """Nothing else, and nil alike: whatever is refused in `sampling` is refused beside it, and in the same words."""
    sent = 0
    lists = [[None], [[1]], [1, 1.5], [1] * 2000, msgspec.Raw(b"\x91" * 2000 + b"\xc0")]
    for value in (*BAD[name], *lists):
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, ValueError):
            continue
        sent += 1
        inside = refuse(service, wire.Kind.GENERATE, {"prompt": "abc", "sampling": {name: value}})
        beside = refuse(service, wire.Kind.GENERATE, {"prompt": "abc", name: value})
        assert (beside.code, beside.field) == (inside.code, inside.field) == ("bad_field", name)
        assert beside.message == inside.message.replace(f"sampling.{name}", name)
    assert sent > 3
    client = raw(serve())
    for value in (1, None):
        where = [{"sampling": {"max_tokens": 1, name: value}}, {"sampling": {"max_tokens": 1}, name: value}]
        replies = []
        for fields_ in where:
            client.frames(b"MIRO1", b"\x02", b"12345678", msgspec.msgpack.encode({"prompt": "abc", **fields_}))
            replies.append(client.receive()[1])
        assert type(replies[0]) is type(replies[1])
        assert isinstance(replies[0], wire.End) == (value == 1 or name == "logprobs")


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (1, True), (True, 1), (1, 1.0), (1.0, 1), (1, None)])
def test_what_is_given_twice_is_equal(service, first, second):
    for name in wire.ALSO_SAMPLING:
        error = refuse(service, wire.Kind.GENERATE, {"prompt": "a", "sampling": {name: first}, name: second})
        assert (error.code, error.field) == ("bad_field", name)


@pytest.mark.parametrize("pair", [(NAN, NAN), (NAN, 1), (1, NAN), (True, 1), (1.5, 1)])
def test_what_is_given_twice_and_wrong_says_what_is_wrong(service, pair):
    for name in wire.ALSO_SAMPLING:
        error = refuse(service, wire.Kind.GENERATE, {"prompt": "a", "sampling": {name: pair[0]}, name: pair[1]})
        assert "must be an integer" in error.message


@pytest.mark.parametrize("kind", [*KINDS, wire.Generate, wire.ChatMessage], ids=lambda k: k.__name__)
def test_an_unknown_field_is_named(service, kind):
    for name in ("colour", "Prompt", "_", "é", "x", "long" * 100):
        needed = {"add": 1} if kind is wire.Credit else {}
        error = refuse(service, KINDS.get(kind, wire.Kind.GENERATE), {**needed, **body_of(kind, name, 1)})
        assert (error.code, error.field) == ("bad_field", PLACES.get(kind, "") + name[:80])


def test_an_unknown_sampling_parameter_is_named(service):
    for name in ("tempreature", "", "é", "N", "long" * 100):
        error = refuse(service, wire.Kind.GENERATE, {"prompt": "a", "sampling": {name: 1}})
        assert (error.code, error.field) == ("bad_field", name[:80])


def test_a_missing_field_is_named(service):
    assert refuse(service, wire.Kind.CREDIT, {}).field == "add"
    assert refuse(service, wire.Kind.GENERATE, {}).field == "prompt"
    assert refuse(service, wire.Kind.GENERATE, {"messages": [{"content": "x"}]}).field == "messages[0].role"
    error = refuse(service, wire.Kind.GENERATE, {"messages": [{"role": "a", "content": [{"type": "text"}]}]})
    assert error.field == "messages[0].content[0]"


def test_a_field_beside_extension_keys_is_named(service):
    for kind, body, field in (
        (wire.Kind.HELLO, {"x_a": 1, "minor": -1}, "minor"),
        (wire.Kind.GENERATE, {"x_a": 1, "prompt": "a", "sampling": {"stop": {}}}, "stop"),
        (wire.Kind.GENERATE, {"x_a": 1, "messages": [{"role": 1, "content": ""}]}, "messages[0].role"),
    ):
        assert refuse(service, kind, body).field == field


@pytest.mark.parametrize(
    "kind", [kind for kind in wire.Kind if kind < 0x80 and kind != wire.Kind.GENERATE], ids=lambda kind: kind.name
)
def test_a_small_body_too_large(service, kind):
    error = refuse(service, kind, {"x_big": "x" * 5000})
    assert error.code in ("too_large", "unsupported")
