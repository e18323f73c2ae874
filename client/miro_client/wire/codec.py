"""Frames: how messages are put together and taken apart. What `encode` writes, the decoders give back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from miro_client.errors import BadField, BadFrame, BadVersion, RequestError, TooLarge, UnknownType
from miro_client.wire.kinds import (
    EXTENSION,
    MAX_ECHO_DEPTH,
    MAX_ID_BYTES,
    MAX_SMALL_BODY_BYTES,
    MIN_ID_BYTES,
    PROTOCOL,
    Kind,
)
from miro_client.wire.replies import (
    Accepted,
    Answers,
    Chunk,
    DrainReply,
    End,
    Error,
    HealthReply,
    ModelsReply,
    Pong,
    Reply,
    Result,
    StatsReply,
    Welcome,
)
from miro_client.wire.requests import (
    ALSO_SAMPLING,
    Cancel,
    Credit,
    Drain,
    Generate,
    Health,
    Hello,
    Models,
    Ping,
    Request,
    SamplingValue,
    Stats,
)
from miro_client.wire.skim import entries

_KINDS: dict[type[Struct], Kind] = {
    Hello: Kind.HELLO,
    Generate: Kind.GENERATE,
    Credit: Kind.CREDIT,
    Cancel: Kind.CANCEL,
    Ping: Kind.PING,
    Stats: Kind.STATS,
    Health: Kind.HEALTH,
    Models: Kind.MODELS,
    Drain: Kind.DRAIN,
    Welcome: Kind.WELCOME,
    Accepted: Kind.ACCEPTED,
    Chunk: Kind.CHUNK,
    End: Kind.END,
    Pong: Kind.PONG,
    Error: Kind.ERROR,
}
_RESULTS = (StatsReply, HealthReply, ModelsReply, DrainReply)
REQUESTS = frozenset(kind for kind in _KINDS.values() if kind < Kind.WELCOME)
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(body) for body, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()
_SAMPLING_VALUE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(SamplingValue)


class Head(NamedTuple):
    """A message taken apart, without its routing id. When `error` is set, id is empty unless it was usable."""

    delimited: bool  # an empty first frame, as REQ sockets put it; a reply must carry it too
    kind: int
    id: bytes
    body: bytes
    error: RequestError | None = None


def encode(request_id: bytes, body: Request | Reply | Answers) -> list[bytes]:
    """The four frames of a message."""
    if isinstance(body, Result):
        return [PROTOCOL, bytes((Kind.RESULT,)), request_id, body.body]
    kind = Kind.RESULT if isinstance(body, _RESULTS) else _KINDS[type(body)]
    return [PROTOCOL, bytes((kind,)), request_id, _ENCODER.encode(body)]


def split(frames: Sequence[bytes]) -> Head:
    """Take a message apart. Never raises: what is wrong with it stands in `error`."""
    delimited = len(frames) > 0 and not frames[0]
    rest = frames[1:] if delimited else frames
    usable = len(rest) == 4 and MIN_ID_BYTES <= len(rest[2]) <= MAX_ID_BYTES
    request_id = rest[2] if usable else b""
    error: RequestError | None = None
    if not rest:
        error = BadFrame("a message needs 4 frames, got none")
    elif rest[0] != PROTOCOL:
        error = BadVersion(f"this worker speaks {PROTOCOL.decode()}, not {rest[0][:16]!r}")
    elif len(rest) != 4:
        error = BadFrame(f"a message has 4 frames, got {len(rest)}")
    elif len(rest[1]) != 1:
        error = BadFrame(f"the message type is one byte, got {len(rest[1])}")
    elif not usable:
        error = BadFrame(f"a request id has {MIN_ID_BYTES} to {MAX_ID_BYTES} bytes, got {len(rest[2])}")
    elif rest[1][0] not in Kind.__members__.values():
        error = UnknownType(f"unknown message type 0x{rest[1][0]:02x}")
    if error is not None:
        return Head(delimited, 0, request_id, b"", error)
    return Head(delimited, rest[1][0], request_id, rest[3])


def decode_request(kind: int, body: bytes) -> Request:
    """Decode a request body strictly. Raises BadField naming the field, BadFrame (no msgpack map) or TooLarge."""
    if kind not in REQUESTS:
        raise UnknownType(f"message type 0x{kind:02x} is not a request with a body")
    if kind != Kind.GENERATE and len(body) > MAX_SMALL_BODY_BYTES:
        raise TooLarge(f"the body of {Kind(kind).name} takes at most {MAX_SMALL_BODY_BYTES} bytes, got {len(body)}")
    request = _decode(kind, body)
    if isinstance(request, Ping):
        _check_echo(request.echo)
    return request


def decode_reply(frames: Sequence[bytes]) -> tuple[bytes, Reply]:
    """(request id, body) of a worker's message. Raises BadVersion, BadFrame, UnknownType or BadField."""
    delimited = len(frames) > 0 and not frames[0]
    rest = frames[1:] if delimited else frames
    # Unlike a request's, the id of an ERROR may be empty.
    if len(rest) != 4 or len(rest[1]) != 1 or len(rest[2]) > MAX_ID_BYTES:
        raise BadFrame(f"a reply has 4 frames with a one-byte type, got {len(rest)}")
    if rest[0] != PROTOCOL:
        raise BadVersion(f"the worker speaks {rest[0][:16]!r}, not {PROTOCOL.decode()}")
    kind = rest[1][0]
    if kind == Kind.RESULT:
        return rest[2], Result(rest[3])
    if kind < 0x80 or kind not in _DECODERS:
        raise UnknownType(f"unknown reply type 0x{kind:02x}")
    try:
        return rest[2], _DECODERS[kind].decode(rest[3])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadField(f"a reply of type 0x{kind:02x} cannot be decoded: {error!s:.200}") from None


def _decode(kind: int, body: bytes) -> Request:
    try:
        request: Request = _DECODERS[kind].decode(body)
        if not (isinstance(request, Generate) and any(key.startswith(EXTENSION) for key in request.sampling)):
            return request
    except (msgspec.ValidationError, RecursionError):
        pass  # an extension key may be all that is wrong
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_frame(error) from None
    body = _without_extensions(body)
    try:
        return _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _bad_field(error, body) from None
    except RecursionError as error:
        raise _too_deep(kind, body) or _bad_frame(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_frame(error) from None


def _check_echo(echo: Any) -> None:
    """Refuse what nests deeper than MAX_ECHO_DEPTH. Level by level: Python's own limit counts the caller's frames too,
    so that what could be decoded might not be encoded again.
    """
    level = _nesting((echo,))
    for _ in range(MAX_ECHO_DEPTH):
        level = [item for value in level for item in _nesting(value)]
    if level:
        raise _deep_echo()


def _nesting(values: Iterable[Any]) -> list[Any]:
    """Those that may hold others. Of a map: its keys too, a list that is a key is a tuple."""
    held = (*values.keys(), *values.values()) if isinstance(values, dict) else values
    return [value for value in held if isinstance(value, (dict, list, tuple))]


def _deep_echo() -> BadField:
    return BadField(f"echo nests deeper than {MAX_ECHO_DEPTH}", field="echo")


def _too_deep(kind: int, body: bytes) -> BadField | None:
    """The refusal of a body without extension keys that nests too deep to be decoded; None if it is no map at all."""
    try:
        entries(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    # No other fields have values that nest at will.
    return _deep_echo() if kind == Kind.PING else BadField("messages nest too deep", field="messages")


def _without_extensions(body: bytes) -> bytes:
    """The body without extension keys, which may hold anything, here and in `sampling`; as it is if it is no map."""
    try:
        plain = _drop_extensions(entries(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    try:
        if "sampling" in plain:
            plain["sampling"] = msgspec.Raw(_ENCODER.encode(_drop_extensions(entries(plain["sampling"]))))
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # no map: it is refused as it is
    return _ENCODER.encode(plain)


def _drop_extensions(given: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return {key: raw for key, raw in given.items() if not key.startswith(EXTENSION)}


def _bad_frame(error: Exception) -> BadFrame:
    return BadFrame(f"the body is not a msgpack map: {error!s:.200}")


def _bad_field(error: msgspec.ValidationError, body: bytes) -> RequestError:
    """The refusal that names what is wrong: a key, the path of a value ("messages[2].role"), a sampling parameter."""
    text = str(error)
    path = re.search(r"(?:at|in) `\$\.?([^`]{0,80})`$", text)
    if path is None and text.startswith("Expected `object`, got"):
        return BadFrame(f"the body must be a msgpack map: {text:.200}")
    if path is not None and not path[1]:
        return BadFrame(f"the body must be a msgpack map with strings as keys: {text:.200}")
    where = path[1].split("[...]")[0] if path else ""
    if where == "sampling" and (name := _bad_sampling(body)):
        where, text = name, text.replace("sampling[...]", f"sampling.{name}")
    elif (name := where.split("[")[0]) in ALSO_SAMPLING:
        where = name  # no place in a list: as inside of sampling
    key = re.search(r"(?:unknown|required) field `([^`]{1,80})", text)
    return BadField(text[:300], field=".".join(filter(None, (where, key and key[1]))) or None)


def _bad_sampling(body: bytes) -> str:
    """The first sampling parameter whose value is of no known type; empty if there is none."""
    try:
        values = entries(entries(body)["sampling"])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    for name, raw in values.items():
        try:
            _SAMPLING_VALUE.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return name[:80]
    return ""
