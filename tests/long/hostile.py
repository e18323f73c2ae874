"""Messages no client should send, mixed with sound ones; and bytes no ZeroMQ peer would. All of it from a seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec

from miro_client import wire
from miro_client.wire import Kind
from miro_cy.sampling.params import SamplingParams

EXT = msgspec.msgpack.Ext
#: One of each type, and the edges of each type's range.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 127, 128, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1,
    2**64 - 1, -(2**31), -(2**31) - 1, -(2**63), 0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"),
    -float("inf"), "", "a", "é😀", "\0", "x" * 300, "x" * 3000, b"", b"\0" * 4, b"\xff" * 4, b"\1\0\0\0" * 9, b"abc",
    [], [None], [0], [-1], [""], ["a"], ["a", 1], [[]], [[[1]]], ["s"] * 65, [1] * 1025, {}, {"a": 1}, {"role": "user"},
    {"": None}, {"x_": 1}, [{"role": "user", "content": "hi"}], [{"role": "", "content": ""}], [{"role": 1}],
    [{"role": "user", "content": "he", "name": "x"}], EXT(1, b"abc"), EXT(-1, b"\0\0\0\0"), EXT(127, b""),
]  # fmt: skip
#: Every field of every body, and every sampling parameter.
FIELDS: list[tuple[Kind, str]] = [
    *[(Kind.HELLO, name) for name in wire.Hello.__struct_fields__],
    *[(Kind.GENERATE, name) for name in wire.Generate.__struct_fields__],
    *[(Kind.GENERATE, f"sampling.{name}") for name in SamplingParams.__dataclass_fields__],
    *[(Kind.CREDIT, name) for name in (*wire.Credit.__struct_fields__, "x_more", "more")],
    *[(Kind.CANCEL, name) for name in ("x_more", "more")],
    *[(Kind.PING, name) for name in (*wire.Ping.__struct_fields__, "x_more", "more")],
]
#: Bytes that begin msgpack values longer than any message.
BOASTS = [
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9\xff",
]
ABOUT = (Kind.CREDIT, Kind.CANCEL)


class Message(NamedTuple):
    """What goes out. `id` is set when the message is well framed and no other has its id; answers: 0 or 1."""

    frames: list[bytes]
    id: bytes | None
    answers: int


class Hostile:
    """A source of messages. `cases` walks once through every wrong value in every field, then random ones follow."""

    def __init__(self, seed: int, share: int = 1) -> None:
        self.draw = random.Random(seed)
        self._seed = seed
        self._count = 0
        self._known: list[bytes] = []  # of sound GENERATEs
        self.cases = [(field, value) for field in FIELDS for value in VALUES][seed % share :: share]

    def next(self) -> Message:
        make = self.draw.choices(
            [self._wrong_type, self._sound, self._mutated, self._deep, self._noise, self._misframed, self._about],
            [9, 3, 6, 2, 3, 3, 2],
        )[0]
        return make()

    def _id(self) -> bytes:
        self._count += 1
        return b"%02x%06x" % (self._seed % 256, self._count) + self.draw.randbytes(self.draw.choice([0, 0, 4, 8]))

    def _framed(self, kind: int, body: bytes) -> Message:
        request_id = self._id()
        frames = [wire.PROTOCOL, bytes([kind]), request_id, body]
        # As REQ sockets do; replies carry the empty frame too.
        return Message([b""] * (self.draw.random() < 0.1) + frames, request_id, 1)

    def _fields(self, kind: int) -> dict[str, Any]:
        """A sound body."""
        draw = self.draw
        if kind == Kind.HELLO:
            return {"minor": draw.randrange(9), "client": "fuzz", "lang": "python"}
        if kind == Kind.PING:
            return {"echo": draw.choice(VALUES)} if draw.random() < 0.5 else {}
        if kind == Kind.CREDIT:
            return {"add": draw.randrange(1, 9)}
        if kind != Kind.GENERATE:
            return {}
        prompts: list[dict[str, Any]] = [
            {"prompt": "hello wo" * draw.randrange(1, 9)},
            {"tokens": wire.pack_ids(draw.choices(range(200), k=draw.randrange(1, 40)))},
            {"messages": [{"role": "user", "content": "hello"}] * draw.randrange(1, 4)},
        ]
        body: dict[str, Any] = draw.choice(prompts)
        body["sampling"] = {"max_tokens": draw.randrange(20), "seed": draw.randrange(2**32)}
        body["sampling"] |= draw.choice([{}, {"temperature": 0}, {"top_k": 5}, {"logprobs": 2}, {"stop": ["e", "xyz"]}])
        body["stream"] = draw.random() < 0.7
        if body["stream"] and draw.random() < 0.1:
            body["credit"] = draw.randrange(1, 30)
        return body

    def _sound(self) -> Message:
        kind = self.draw.choice([Kind.HELLO, Kind.PING, Kind.GENERATE, Kind.GENERATE])
        body = self._fields(kind)
        if kind != Kind.GENERATE:
            return self._framed(kind, msgspec.msgpack.encode(body))
        request_id = self._id()
        self._known.append(request_id)
        return Message([wire.PROTOCOL, bytes([kind]), request_id, msgspec.msgpack.encode(body)], request_id, 1)

    def _about(self) -> Message:
        """A sound CANCEL or CREDIT: of a request that is, or was, it gets no answer."""
        kind = self.draw.choice(ABOUT)
        body = msgspec.msgpack.encode(self._fields(kind))
        if not self._known or self.draw.random() < 0.2:
            return self._framed(kind, body)
        known = self.draw.choice(self._known[-8:])
        return Message([wire.PROTOCOL, bytes([kind]), known, body], None, 0)

    def _wrong_type(self) -> Message:
        (kind, name), value = self.cases.pop() if self.cases else (self.draw.choice(FIELDS), self.draw.choice(VALUES))
        body = self._fields(kind)
        outer, _, inner = name.partition(".")
        if inner:
            body[outer] = {**body[outer], inner: value}
        else:
            body[outer] = value
        return self._framed(kind, msgspec.msgpack.encode(body))

    def _mutated(self) -> Message:
        """A sound body with some bytes changed, put in, left out or repeated."""
        kind = self.draw.choice([Kind.HELLO, Kind.GENERATE, Kind.GENERATE, Kind.GENERATE, Kind.PING, *ABOUT])
        body = bytearray(msgspec.msgpack.encode(self._fields(kind)))
        return self._framed(kind, damage(self.draw, body))

    def _deep(self) -> Message:
        """Values within values, closed or not, where any value may stand and where none may."""
        draw = self.draw
        depth = draw.choice([5, 60, 500, 1500, 4000, 20_000, 60_000])
        nest = draw.choice([b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1", b"\x92\xc0", b"\x81\xc0"])
        value = nest * depth + draw.choice([b"", b"\xc0", b"\x01"])
        name = draw.choice([b"echo", b"x_any", b"prompt", b"sampling", b"messages", b"resume", b"nonsense"])
        body = draw.choice([value, b"\x81" + bytes([0xA0 + len(name)]) + name + value])
        return self._framed(draw.choice([Kind.GENERATE, Kind.GENERATE, Kind.PING, Kind.HELLO]), body)

    def _noise(self) -> Message:
        """A well-framed message of random bytes under any type, also types no client may send."""
        draw = self.draw
        body = draw.choice([b"", b"\x80"]) + draw.choice(BOASTS + [b""] * 5)
        body += draw.randbytes(draw.choice([0, 1, 2, 8, 100, 5000, 60_000]))
        return self._framed(draw.choice([*Kind, draw.randrange(256)]), body)

    def _misframed(self) -> Message:
        """Frames that are no message: too few, too many, of wrong sizes. It gets one ERROR, under an id or none."""
        draw = self.draw
        frames = [wire.PROTOCOL, bytes([draw.choice([2, 3, 4, 10])]), self._id(), b"\x80"]
        for _ in range(draw.choice([1, 1, 2, 3])):
            at = draw.randrange(len(frames))
            way = draw.randrange(4)
            if way == 0 and len(frames) > 1:
                del frames[at]
            elif way == 1:
                frames[at:at] = [draw.randbytes(draw.choice([0, 1, 5, 8, 300]))] * draw.choice([1, 2, 70])
            elif way == 2:
                frames[at] = draw.choice([b"", frames[at] * 2, frames[at] + b"\0", frames[at][:-1], b"MIRO2", b"\0"])
            else:
                frames[at] = draw.randbytes(draw.choice([0, 1, 7, 17, 1000]))
        head = wire.split(frames)
        # By chance it may be a message about a request that this connection never made: that has an answer as well.
        return Message(frames, None if head.error is not None else head.id, 1)


def damage(draw: random.Random, body: bytearray) -> bytes:
    """A few random edits."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(len(body) + 1)
        way = draw.randrange(5)
        if way == 0 and at < len(body):
            body[at] ^= 1 << draw.randrange(8)
        elif way == 1 and at < len(body):
            body[at] = draw.choice([0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC3, 0xC4, 0xCB, 0xCF, 0xD3, 0xD9, 0xDF, 0xFF])
        elif way == 2:
            body[at:at] = draw.choice([b"\xc0", b"\xc1", draw.randbytes(3), *BOASTS])
        elif way == 3:
            del body[at : at + draw.choice([1, 2, 8])]
        else:
            start = draw.randrange(len(body) + 1)
            body[at:at] = body[start : start + draw.choice([1, 8, 40])]
    return bytes(body)


# --- below the messages ------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def command(name: bytes, rest: bytes) -> bytes:
    body = bytes([len(name)]) + name + rest
    return b"\x04" + bytes([len(body)]) + body


def connection(draw: random.Random) -> tuple[bytes, bytes]:
    """What a peer sends to shake hands, and after that: ZMTP 3.0 that goes wrong somewhere, or noise."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.choice([1, 10, 64, 65, 5000])), b""
    kind = draw.choice([b"DEALER"] * 8 + [b"REQ", b"ROUTER", b"PUB", b"", b"x" * 90])
    identity = draw.choice([b""] * 4 + [b"me", b"\0zero", b"x" * 100])
    properties = b"\x0bSocket-Type" + len(kind).to_bytes(4) + kind
    properties += b"\x08Identity" + len(identity).to_bytes(4) + identity
    hello = bytearray(GREETING + command(b"READY", properties))
    pieces = []
    for _ in range(draw.randrange(1, 5)):
        pieces.append(
            draw.choice(
                [
                    b"\x01\x05MIRO1\x01\x01\x0a\x01\x0812345678\x00\x01\x80",
                    b"\x01\x05MIRO1\x01\x01\x02",  # the rest never comes
                    command(b"PING", draw.randbytes(2) + b"context" * draw.randrange(20)),
                    command(b"PONG", draw.randbytes(draw.randrange(40))),
                    command(b"READY", properties),
                    command(b"ERROR", b"\x03bad"),
                    command(b"SUBSCRIBE", b"all"),
                    b"\x02" + draw.choice([2**20, 2**23, 2**31, 2**63, 2**64 - 1]).to_bytes(8) + b"begin",
                    b"\x00\x00" * draw.choice([1, 50]),
                    b"\x01\x00" * 500,
                ]
            )
        )
    rest = bytearray(b"".join(pieces))
    way = draw.randrange(6)
    if way == 0:
        return damage(draw, hello), bytes(rest)
    if way == 1:
        return bytes(hello[: draw.randrange(len(hello))]), b""
    if way == 2:
        return bytes(hello), bytes(rest[: draw.randrange(len(rest))])
    return bytes(hello), damage(draw, rest) if way > 3 else bytes(rest)
