"""Streaming text: any chunking gives the same characters, and stop strings are found wherever tokens end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.text import TextStream, Tokenizer

# Few letters, some of several bytes that share their first ones, so that stops and characters often begin alike.
ALPHABET = "abéè東杳🚀"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` as pieces that end at the cuts (taken modulo its length); some of them empty."""
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """What comes out, piece by piece, and the stop string; each piece is one token."""
    stream = TextStream(lambda i: pieces[i], stops)
    out = []
    for i in range(len(pieces)):
        text, stop = stream.push(i)
        out.append(text)
        if stop is not None:
            assert stream.push(0) == ("", None)
            assert stream.finish() == ""
            return out, stop
    return [*out, stream.finish()], None


def expected(data: bytes, stops: Sequence[str]) -> tuple[str, str | None]:
    """The specification, byte by byte: the first end of a stop; of those that end there the longest, then the first."""
    for end in range(len(data) + 1):
        ending = [stop for stop in stops if data[:end].endswith(stop.encode())]
        if ending:
            stop = max(ending, key=len)
            return data[: end - len(stop.encode())].decode(errors="replace"), stop
    return data.decode(errors="replace"), None


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=20))
def test_pieces_join_to_the_whole_for_any_bytes(data: bytes, cuts: list[int]) -> None:
    out, stop = run(cut(data, cuts))
    assert "".join(out) == data.decode(errors="replace")
    assert stop is None


@given(st.text(ALPHABET, max_size=30), STOPS, st.lists(st.integers(0, 1000), max_size=20))
def test_stops_do_not_depend_on_the_chunking(text: str, stops: list[str], cuts: list[int]) -> None:
    data = text.encode()
    out, stop = run(cut(data, cuts), stops)
    assert ("".join(out), stop) == expected(data, stops)
    # No half characters on the way: the text is valid, so nothing is ever replaced.
    assert "\ufffd" not in "".join(out)


@given(st.binary(max_size=30), STOPS, st.lists(st.integers(0, 1000), max_size=20))
def test_stops_in_any_bytes(data: bytes, stops: list[str], cuts: list[int]) -> None:
    out, stop = run(cut(data, cuts), stops)
    assert ("".join(out), stop) == expected(data, stops)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_tokens_join_to_the_decoded_text(tokenizer: Tokenizer, text: str, skip_special: bool) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(skip_special=skip_special)
    streamed = "".join(stream.push(i)[0] for i in ids) + stream.finish()
    assert streamed == tokenizer.decode(ids, skip_special=skip_special) == text


@given(st.lists(st.integers(0, 266)))
def test_any_ids_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream(skip_special=False)
    streamed = "".join(stream.push(i)[0] for i in ids) + stream.finish()
    assert streamed == tokenizer.decode(ids, skip_special=False)


def test_characters_wait_for_their_last_byte() -> None:
    data = "é🚀".encode()
    out, _ = run([data[i : i + 1] for i in range(len(data))])
    assert out == ["", "é", "", "", "", "🚀", ""]


def test_text_that_may_begin_a_stop_waits() -> None:
    assert run([b"a", b"\n", b"b", b"\n", b"\n"], ["\n\n"]) == (["a", "", "\nb", "", ""], "\n\n")
    # Nothing is held longer than needed, sent twice or lost when the stop does not come.
    assert run([b"x", b"\n", b"Al", b"ice", b"!"], ["\nAlice:"]) == (["x", "", "", "", "\nAlice!", ""], None)
    assert run([b"x", b"\nAl"], ["\nAlice:"]) == (["x", "", "\nAl"], None)


def test_first_to_end_wins_then_first_to_begin() -> None:
    for pieces in ([b"xabcdef"], [b"xabcd", b"ef"], [b"x", b"a", b"b", b"c", b"d", b"e", b"f"]):
        out, stop = run(pieces, ["abcdef", "cd"])
        assert ("".join(out), stop) == ("xab", "cd")
        out, stop = run(pieces, ["cd", "bcd"])
        assert ("".join(out), stop) == ("xa", "bcd")


def test_skipped_control_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello<|im_end|>hello")
    for skip, text in ((True, "hellohello"), (False, "hello<|im_end|>hello")):
        stream = tokenizer.stream(skip_special=skip)
        assert "".join(stream.push(i)[0] for i in ids) + stream.finish() == text
    stream = tokenizer.stream(["<|im_end|>"], skip_special=False)
    assert [stream.push(i) for i in ids] == [("hello", None), ("", "<|im_end|>"), ("", None)]


@pytest.mark.parametrize("token_id", [-1, 267, 10**6])
def test_ids_past_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.stream().push(token_id) == ("", None)


@pytest.mark.timeout(60)
def test_many_long_stops_that_nearly_match() -> None:
    stops = ["a" * 1000 + chr(0x4E00 + i) for i in range(64)]
    pieces = [b"a" * 4] * 5000
    out, stop = run(pieces, stops)
    assert stop is None
    assert "".join(out) == "a" * 20_000
    # The last thousand waited until the end: they might have begun a stop.
    assert len(out[-1]) == 1000


def test_streams_are_independent(tokenizer: Tokenizer) -> None:
    one, other = tokenizer.stream(["lo w"]), tokenizer.stream(["lo w"])
    (hello,) = tokenizer.encode("hello")
    assert one.push(hello) == ("hel", None)
    assert other.finish() == ""
    assert one.finish() == "lo"


@pytest.mark.timeout(60)
def test_most_stops_a_request_may_have() -> None:
    stops = [chr(0x100 + i) * 512 for i in range(64)]
    out, stop = run([b"x", stops[63].encode()], stops)
    assert (out, stop) == (["x", ""], stops[63])
