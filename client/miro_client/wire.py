"""MIRO/1 on the wire: frames, message types, bodies and their codec. docs/protocol.md is the specification.

A leaf that worker and client share: it knows msgspec and `miro_client.errors`, no socket and no engine. Bodies of
requests are decoded strictly (types, ranges, no unknown key unless it begins with x_); those of replies ignore unknown
keys, so that a newer worker may add some. What `encode` writes, `decode_request` or `decode_reply` gives back.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from miro_client.errors import BadField, BadFrame, BadVersion, MiroError, RequestError, TooLarge, UnknownType

PROTOCOL = b"MIRO1"
MAJOR = 1
MINOR = 0
MIN_ID_BYTES = 8
MAX_ID_BYTES = 16
#: Largest frame a worker takes unless configured otherwise; ZeroMQ drops the connection of one that sends more.
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_MESSAGES = 10_000
MAX_SAMPLING_KEYS = 64
MAX_SAMPLING_ITEMS = 1024
MAX_CREDIT = 1_000_000
#: Largest body of any request but GENERATE.
MAX_SMALL_BODY_BYTES = 4096
#: Extension keys begin with this and are ignored.
EXTENSION = "x_"


class Kind(IntEnum):
    """Message types: below 0x80 from client to worker, from 0x80 from worker to client."""

    HELLO = 0x01
    GENERATE = 0x02
    CREDIT = 0x03
    CANCEL = 0x04
    TOKENIZE = 0x05
    DETOKENIZE = 0x06
    TEMPLATE = 0x07
    EMBED = 0x08
    PING = 0x0A
    STATS = 0x0B
    HEALTH = 0x0C
    MODELS = 0x0D
    DRAIN = 0x0E
    WELCOME = 0x81
    ACCEPTED = 0x82
    CHUNK = 0x83
    PROGRESS = 0x84
    END = 0x85
    RESULT = 0x86
    PONG = 0x8A
    ERROR = 0x8F


# --- bodies, client to worker ----------------------------------------------------------------------------------


class _Request(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the request bodies: strict."""


class Hello(_Request, kw_only=True):
    minor: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    client: Annotated[str, Meta(max_length=256)] = ""
    lang: Annotated[str, Meta(max_length=64)] = ""


class TextPart(_Request, kw_only=True):
    type: Literal["text"]
    text: str


class ChatMessage(_Request, kw_only=True):
    """What a chat template may be told, the same as `Engine` takes; what is nil counts as absent.

    tool_calls: a list of maps. A worker reads it later, within limits on depth and number of values; here it may be
    given as Python's own lists and maps, or encoded.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


SamplingItems = Annotated[list[int | str], Meta(max_length=MAX_SAMPLING_ITEMS)]
SamplingValue = None | bool | int | float | str | SamplingItems
Sampling = Annotated[dict[str, SamplingValue], Meta(max_length=MAX_SAMPLING_KEYS)]


class Generate(_Request, kw_only=True):
    """Exactly one of prompt, tokens (int32 little-endian) and messages is set. `sampling` is checked by the worker."""

    prompt: str | None = None
    tokens: bytes | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    sampling: Sampling = {}
    n: Annotated[int, Meta(ge=1, le=64)] = 1
    stream: bool = False
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    logprobs: int | None = None
    echo: bool = False
    resume: dict[str, int | bytes] | None = None


class Credit(_Request, kw_only=True):
    add: Annotated[int, Meta(ge=1, le=MAX_CREDIT)]


class Cancel(_Request, kw_only=True):
    pass


class Ping(_Request, kw_only=True):
    """echo: any value; it comes back in the PONG."""

    echo: Any = None


class Stats(_Request, kw_only=True):
    pass


class Health(_Request, kw_only=True):
    pass


class Models(_Request, kw_only=True):
    pass


class Drain(_Request, kw_only=True):
    """grace_ms: how long running requests may go on; None leaves it to the worker."""

    grace_ms: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


# --- bodies, worker to client ----------------------------------------------------------------------------------


class _Reply(Struct, omit_defaults=True):
    """Base of the reply bodies: unknown keys are ignored."""


Answer = TypeVar("Answer", bound=Struct)


class Limits(_Reply, kw_only=True):
    """What one connection may do: bytes of a frame, live requests, bytes of prompts not yet tokenised, messages/s."""

    message_bytes: int = 0
    requests: int = 0
    prompt_bytes: int = 0
    messages_per_second: int = 0


class Welcome(_Reply, kw_only=True):
    minor: int
    server: str
    model: str
    context: int
    limits: Limits
    epoch: int
    fingerprint: str


class Accepted(_Reply, kw_only=True):
    """tokens: prompt ids, int32 little-endian; position: absolute position of the first generated token."""

    tokens: bytes
    seed: int
    position: int
    fingerprint: str


#: One generated token: its natural-log probability and the likeliest alternatives, best first.
Logprob = tuple[float, list[tuple[int, float]]]


class Chunk(_Reply, kw_only=True):
    """i: choice, s: sequence number without gaps, t: text, k: token ids, lp: one entry a token."""

    i: int = 0
    s: int
    t: str = ""
    k: bytes = b""
    lp: list[Logprob] | None = None


class Usage(_Reply, kw_only=True):
    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Timing(_Reply, kw_only=True):
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class End(_Reply, kw_only=True):
    """The last message of a choice. t, k, lp, tokens, seed and fingerprint are set when nothing was streamed."""

    i: int = 0
    reason: str
    code: str | None = None
    message: str | None = None
    stop: str | int | None = None
    usage: Usage
    timing: Timing
    t: str | None = None
    k: bytes | None = None
    lp: list[Logprob] | None = None
    tokens: bytes | None = None
    seed: int | None = None
    fingerprint: str | None = None


class Pong(_Reply, kw_only=True):
    """The worker's state; live: ids of this connection's requests that are not finished."""

    epoch: int
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    last_step_age_ms: float = 0.0
    live: list[bytes] = []
    echo: Any = None


class StatsReply(_Reply, kw_only=True):
    """Counters since the start, and gauges. Each GENERATE is in exactly one of live, ended, refused and abandoned.

    requests: GENERATEs received; ended: by the reason of their END; refused: by the code of their ERROR; abandoned:
    their connection was lost. errors: ERRORs to other messages, by code. preparing: prompts that wait to be tokenised.
    dropped: replies that could not be delivered; strays: messages whose connection was gone.
    resident_bytes: memory in use, 0 where unknown.
    """

    epoch: int
    uptime_ms: float
    messages: int = 0
    requests: int = 0
    live: int = 0
    ended: dict[str, int] = {}
    refused: dict[str, int] = {}
    abandoned: int = 0
    errors: dict[str, int] = {}
    dropped: int = 0
    strays: int = 0
    peers: int = 0
    preparing: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    last_step_age_ms: float = 0.0
    resident_bytes: int = 0


class HealthReply(_Reply, kw_only=True):
    """status: starting (no token was generated yet), ok, stalled, draining or failed; ready: whether it is ok.

    stalled_ms: how long the thread that is behind has been at one thing; 0 unless stalled.
    """

    status: str
    ready: bool
    epoch: int
    uptime_ms: float
    live: int = 0
    last_step_age_ms: float = 0.0
    stalled_ms: float = 0.0


class ModelInfo(_Reply, kw_only=True):
    """A model that is served; capacity: tokens that its KV cache holds."""

    name: str
    context: int
    fingerprint: str
    architecture: str = ""
    vocab_size: int = 0
    layers: int = 0
    compute: str = ""
    kv_dtype: str = ""
    block_size: int = 0
    capacity: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    threads: int = 0
    isa: str = ""
    text: bool = True


class ModelsReply(_Reply, kw_only=True):
    models: list[ModelInfo] = []


class DrainReply(_Reply, kw_only=True):
    """live: requests that may still finish."""

    live: int = 0


class Result:
    """The body of a RESULT, to be read as what the request asks for."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def read(self, kind: type[Answer]) -> Answer:
        """Raises BadField when it is something else."""
        try:
            return msgspec.msgpack.decode(self.body, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadField(f"a RESULT cannot be read as {kind.__name__}: {error!s:.200}") from None


class Error(_Reply, kw_only=True):
    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None
    supported: list[int] | None = None


Request = Hello | Generate | Credit | Cancel | Ping | Stats | Health | Models | Drain
Answers = StatsReply | HealthReply | ModelsReply | DrainReply
Reply = Welcome | Accepted | Chunk | End | Pong | Error | Result

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
_RAW = msgspec.msgpack.Decoder(Annotated[dict[str, msgspec.Raw], Meta(max_length=256)])
_SAMPLING_VALUE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(SamplingValue)


# --- frames ----------------------------------------------------------------------------------------------------


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
    try:
        return _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        if f"unknown field `{EXTENSION}" not in str(error):
            raise _bad_field(error, body) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(f"the body is not a msgpack map: {error!s:.200}") from None
    return _decode_extended(kind, body)


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


def _decode_extended(kind: int, body: bytes) -> Request:
    """Decode a body that has extension keys: drop them, then decode strictly."""
    try:
        plain = {key: raw for key, raw in _RAW.decode(body).items() if not key.startswith(EXTENSION)}
        return _DECODERS[kind].decode(_ENCODER.encode(plain))
    except msgspec.ValidationError as error:
        raise _bad_field(error, body) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(f"the body is not a msgpack map: {error!s:.200}") from None


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
    key = re.search(r"(?:unknown|required) field `([^`]{1,80})", text)
    return BadField(text[:300], field=".".join(filter(None, (where, key and key[1]))) or None)


def _bad_sampling(body: bytes) -> str:
    """The first sampling parameter whose value is of no known type; empty if there is none."""
    try:
        values = _RAW.decode(_RAW.decode(body)["sampling"])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    for name, raw in values.items():
        try:
            _SAMPLING_VALUE.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return name[:80]
    return ""


def error_body(error: MiroError) -> Error:
    """The body of the ERROR that tells of it."""
    return Error(
        code=error.code,
        message=error.message,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        supported=[MAJOR] if isinstance(error, BadVersion) else None,
    )


# --- token ids -------------------------------------------------------------------------------------------------


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32, little-endian. Raises BadField when one does not fit."""
    try:
        packed = array("i", ids)
    except (OverflowError, TypeError):
        raise BadField("token ids must be 32-bit integers", field="tokens") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of pack_ids. Raises BadField when the length is not a multiple of 4."""
    if len(data) % 4:
        raise BadField(f"token ids take 4 bytes each, got {len(data)} bytes", field="tokens")
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
