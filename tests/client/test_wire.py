"""The codec: what is encoded is decoded again, and nothing that arrives can break it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_client import wire
from miro_client.errors import BadField, BadFrame, BadVersion, MiroError, TooLarge, UnknownType
from miro_client.wire import Kind, skim

IDS = st.binary(min_size=8, max_size=16)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
COUNTS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)
LOGPROBS = st.none() | st.lists(
    st.tuples(FLOATS, st.lists(st.tuples(st.integers(0, 2**31 - 1), FLOATS), max_size=2)), max_size=2
)
SAMPLING = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers(0, 2**64 - 1) | FLOATS | TEXT | st.lists(TEXT | COUNTS, max_size=3)
)
#: What stays encoded until a worker reads it.
RAW = (TEXT | st.lists(st.dictionaries(TEXT, COUNTS, max_size=2), max_size=2)).map(
    lambda value: msgspec.Raw(msgspec.msgpack.encode(value))
)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"tokens": TOKENS.map(wire.pack_ids)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.builds(wire.ChatMessage, role=TEXT.filter(bool), content=RAW, name=TEXT, tool_calls=RAW),
                min_size=1,
                max_size=3,
            )
        }
    ),
)
REQUESTS = st.one_of(
    st.builds(wire.Hello, minor=COUNTS, client=TEXT, lang=TEXT),
    st.builds(
        lambda prompt, **fields: wire.Generate(**prompt, **fields),
        PROMPTS,
        sampling=SAMPLING,
        n=st.integers(1, 64),
        stream=st.booleans(),
        credit=st.none() | st.integers(1, wire.MAX_CREDIT),
        logprobs=st.none() | COUNTS,
        resume=st.none() | st.fixed_dictionaries({"choice": COUNTS, "tokens": st.binary(max_size=8)}),
    ),
    st.builds(wire.Credit, add=st.integers(1, wire.MAX_CREDIT)),
    st.just(wire.Cancel()),
    st.builds(wire.Ping, echo=st.none() | COUNTS | TEXT | st.binary(max_size=9) | st.lists(COUNTS, max_size=3)),
)
USAGE = st.builds(wire.Usage, prompt=COUNTS, cached=COUNTS, completion=COUNTS)
TIMING = st.builds(wire.Timing, queue_ms=FLOATS, prefill_ms=FLOATS, decode_ms=FLOATS)
REPLIES = st.one_of(
    st.builds(
        wire.Welcome,
        minor=COUNTS,
        server=TEXT,
        model=TEXT,
        context=COUNTS,
        limits=st.builds(wire.Limits, requests=COUNTS),
        epoch=st.integers(0, 2**53),
        fingerprint=TEXT,
    ),
    st.builds(
        wire.Accepted,
        tokens=TOKENS.map(wire.pack_ids),
        seed=st.integers(0, 2**64 - 1),
        position=COUNTS,
        fingerprint=TEXT,
    ),
    st.builds(wire.Chunk, i=COUNTS, s=COUNTS, t=TEXT, k=TOKENS.map(wire.pack_ids), lp=LOGPROBS),
    st.builds(
        wire.End,
        reason=TEXT,
        code=st.none() | TEXT,
        stop=st.none() | TEXT | COUNTS,
        usage=USAGE,
        timing=TIMING,
        t=st.none() | TEXT,
        k=st.none() | st.binary(),
        lp=LOGPROBS,
        plp=LOGPROBS.map(lambda entries: entries and [None, *entries]),
    ),
    st.builds(wire.Pong, epoch=COUNTS, live=st.lists(IDS, max_size=3), last_step_age_ms=FLOATS),
    st.builds(
        wire.Error,
        code=TEXT,
        message=TEXT,
        field=st.none() | TEXT,
        retry_after_ms=st.none() | COUNTS,
        supported=st.none() | st.just([1]),
    ),
)


@given(IDS, REQUESTS)
def test_requests_come_back(request_id, body):
    frames = wire.encode(request_id, body)
    for sent in (frames, [b"", *frames]):
        head = wire.split(sent)
        assert head.error is None
        assert head.delimited is (len(sent) == 5)
        assert head.id == request_id
        assert wire.decode_request(head.kind, head.body) == body


@given(IDS, REPLIES)
def test_replies_come_back(request_id, body):
    frames = wire.encode(request_id, body)
    assert wire.decode_reply(frames) == (request_id, body)
    assert wire.decode_reply([b"", *frames]) == (request_id, body)


@given(TOKENS)
def test_token_ids_come_back(tokens):
    packed = wire.pack_ids(tokens)
    assert wire.unpack_ids(packed) == tokens
    assert packed == b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


@given(st.lists(st.binary(max_size=20) | st.just(wire.PROTOCOL), max_size=6))
def test_any_frames_are_taken_apart(frames):
    head = wire.split(frames)
    if head.error is None:
        try:
            wire.decode_request(head.kind, head.body)
        except MiroError:
            return
    else:
        assert head.error.code in ("bad_version", "bad_frame", "unknown_type")
        assert head.id == b"" or 8 <= len(head.id) <= 16


@given(st.sampled_from([Kind.HELLO, Kind.GENERATE, Kind.CREDIT, Kind.CANCEL, Kind.PING]), st.binary(max_size=60))
def test_any_body_is_decoded_or_refused(kind, body):
    try:
        wire.decode_request(kind, body)
    except (BadField, BadFrame):
        return


@given(st.lists(st.binary(max_size=12) | st.sampled_from([wire.PROTOCOL, b"\x83", b"\x8f", b"\x80"]), max_size=5))
def test_any_reply_is_decoded_or_refused(frames):
    try:
        wire.decode_reply(frames)
    except (BadField, BadFrame, BadVersion, UnknownType):
        return


def test_the_bytes_are_as_specified():
    assert wire.encode(b"abcdefgh", wire.Generate(prompt="hi", stream=True, sampling={"top_k": 1})) == [
        b"MIRO1",
        b"\x02",
        b"abcdefgh",
        b"\x83\xa6prompt\xa2hi\xa8sampling\x81\xa5top_k\x01\xa6stream\xc3",
    ]
    assert wire.encode(b"abcdefgh", wire.Chunk(s=2, t="é", k=wire.pack_ids([1, 258])))[3] == (
        b"\x83\xa1s\x02\xa1t\xa2\xc3\xa9\xa1k\xc4\x08\x01\x00\x00\x00\x02\x01\x00\x00"
    )


def test_unknown_keys_are_refused_in_requests_and_ignored_in_replies():
    encode = msgspec.msgpack.encode
    with pytest.raises(BadField) as caught:
        wire.decode_request(Kind.CREDIT, encode({"add": 1, "new": 2}))
    assert caught.value.field == "new"
    assert wire.decode_request(Kind.CREDIT, encode({"x_new": {"a": [1]}, "add": 1})) == wire.Credit(add=1)
    with pytest.raises(BadField) as caught:
        wire.decode_request(Kind.CREDIT, encode({"x_new": 2, "add": 0}))
    assert caught.value.field == "add"
    frames = [b"MIRO1", b"\x8a", b"12345678", encode({"epoch": 1, "new": 2})]
    assert wire.decode_reply(frames)[1] == wire.Pong(epoch=1)


def test_limits_are_checked_before_anything_is_made():
    huge = b"\x81\xa8sampling\x81\xa4stop\xdd" + (10**6).to_bytes(4, "big") + b"\x01" * 10**6
    with pytest.raises(BadField):
        wire.decode_request(Kind.GENERATE, huge)
    with pytest.raises(BadFrame):
        wire.decode_request(Kind.GENERATE, b"\x81\xa6prompt\xdb\xff\xff\xff\xff")
    with pytest.raises(TooLarge):
        wire.decode_request(Kind.PING, b"\x81\xa4echo\xc5\xff\x00" + b"a" * 0xFF00)
    for bad in (b"123", b"12345"):
        with pytest.raises(BadField):
            wire.unpack_ids(bad)
    for wrong in ([2**31], ["a"], [1.5]):
        with pytest.raises(BadField):
            wire.pack_ids(wrong)


SIZES = st.sampled_from([0, 5, 300, 70_000])
LEAVES = st.one_of(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(),
    SIZES.map(lambda size: "x" * size),
    SIZES.map(bytes),
    SIZES.map(lambda size: [None] * size),
    SIZES.map(lambda size: {str(i): i for i in range(size % 999)}),
    st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=20) | SIZES.map(bytes)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=4,
)


def taken_apart(walk, data: bytes) -> dict[str, bytes] | None:
    try:
        return {key: bytes(raw) for key, raw in walk(data).items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@given(st.dictionaries(st.text(max_size=40), VALUES, max_size=20).map(msgspec.msgpack.encode), st.data())
def test_a_walk_finds_what_recursion_finds(data, draw):
    """Also of what is cut off, or has a byte too many or another one."""
    at = draw.draw(st.integers(0, min(len(data) - 1, 200)))
    other = data[:at] + bytes([draw.draw(st.integers(0, 255))]) + data[at + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skim, "MAX_WALKED", 10**6)
        for sent in (data, data[:at], data[:-1], data + b"\x01", other):
            assert taken_apart(lambda sent: skim._Walk(sent).entries(), sent) == taken_apart(skim.entries, sent)


def test_a_walk_ends():
    deep = b"\x82\xa1a" + b"\x91" * 3000 + b"\xc0\xa1b"
    assert bytes(skim.entries(deep + b"\x05")["b"]) == b"\x05"
    with pytest.raises(msgspec.DecodeError):
        skim.entries(deep + b"\xdd" + (10**6).to_bytes(4, "big") + b"\x01" * 10**6)
