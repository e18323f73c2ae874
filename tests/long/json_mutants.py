"""Damaged JSON, as text: values of other types and sizes, keys left out, doubled or renamed, nesting, and raw bytes.

The result need not be JSON that Python would write: NaN, numbers of thousands of digits and keys twice are wanted.
"""

from __future__ import annotations

import json
import random
from typing import Any


class Raw(str):
    """Written as it is."""


class Pairs(list[list[Any]]):
    """An object: [key, value] each, in order, so that a key can come twice."""


NUMBERS = [
    "0", "-1", "1", "2", "3", "127", "255", "65536", "2147483647", "2147483648", "4294967295", "4294967296",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "-9223372036854775809", "1" + "0" * 400, "9" * 5000, "0.5", "-0.0", "1e-320", "1e308", "1e309", "-1e309", "1e99999",
    "NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x10", "1_000",
]  # fmt: skip
TEXTS = [
    "", " ", "a", "llama", "F32", "BF16", "BPE", "Unigram", "ByteLevel", "<s>", "null", "../config.json", "/dev/zero",
    "\0", "\ud800", "\U0001f600", "é" * 300, "x" * 1_000_000, "{{ " * 2000, "(" * 5000, "(a*)*b", ".{1000}{1000}",
    "{% for i in range(10**9) %}{% for j in range(10**9) %}{{ i }}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}",
    "{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{{ messages[0].content }}",
]  # fmt: skip
WORDS = ["null", "true", "false", "[]", "{}", "[[]]", '[""]', "[0]", "[null]", '{"":null}', '{"type":"Sequence"}', ""]
JUNK = [b"\0", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b'"', b"[" * 100_000, b"{}", b","]
DEPTHS = [2, 10, 100, 1000, 3000, 200_000]
#: That repeating something may add.
MAX_CHARS = 2_000_000


def parse(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=lambda items: Pairs([list(item) for item in items]))


def write(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{write(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """One mutation of what the values are, or, less often, of the text itself."""
    if draw.random() < 0.2:
        return damaged_text(draw, data)
    top = [parse(data)]
    home, at = _place(draw, top)
    draw.choice(MUTATIONS)(draw, top, home, at)
    return write(top[0] if top else Raw("")).encode(errors="surrogatepass")


def damaged_text(draw: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                del out[at : at + draw.choice([1, 2, 20, len(out)])]
            case 2:
                out[at:at] = draw.choice(JUNK)
            case 3:
                source = draw.randrange(len(out) + 1)
                out[at:at] = out[source : source + draw.randint(1, 200)]
            case 4:
                out[at : at + 1] = draw.choice(NUMBERS).encode()
            case _:
                out = bytearray(out.decode(errors="replace").encode(draw.choice(["utf-16", "utf-8-sig", "utf-32"])))
    return bytes(out)


def _place(draw: random.Random, top: list[Any]) -> tuple[Any, int]:
    """Somewhere in the tree: a list or Pairs, and an index in it. Each level is as likely as the last."""
    home, at = top, 0
    while True:
        value = home[at][1] if isinstance(home, Pairs) else home[at]
        if not isinstance(value, list) or not value or draw.random() < 0.15:
            return home, at
        home, at = value, draw.randrange(len(value))


def _get(home: Any, at: int) -> Any:
    return home[at][1] if isinstance(home, Pairs) else home[at]


def _put(home: Any, at: int, value: Any) -> None:
    if isinstance(home, Pairs):
        home[at][1] = value
    else:
        home[at] = value


def _replace(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    """Another value, of whatever type."""
    value: Any = draw.choice([Raw(draw.choice(NUMBERS)), Raw(draw.choice(WORDS)), draw.choice(TEXTS)])
    _put(home, at, value)


def _near(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    """A value of the same type: another number, another text."""
    old = _get(home, at)
    if isinstance(old, bool):
        _put(home, at, not old)
    elif isinstance(old, (int, float)):
        step = draw.choice([-8, -1, 1, 8])
        _put(home, at, draw.choice([old + step, old * 2, old // 2, -old, Raw(draw.choice(NUMBERS)), float(old)]))
    elif isinstance(old, str):
        cut = draw.randrange(len(old) + 1)
        many = old * (MAX_CHARS // (100 * len(old) + 1))
        _put(home, at, draw.choice([draw.choice(TEXTS), old[:cut], old + old, old[:cut] + draw.choice(TEXTS), many]))
    else:
        _replace(draw, top, home, at)


def _delete(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    del home[at]


def _twice(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    """The entry once more, perhaps with another value or very often."""
    entry = home[at]
    if isinstance(home, Pairs):
        entry = [entry[0], draw.choice([entry[1], Raw("null"), Raw(draw.choice(NUMBERS)), draw.choice(TEXTS)])]
    times = min(draw.choice([1, 1, 1, 2, 1000, 30_000]), MAX_CHARS // len(write(entry)) + 1)
    index = draw.choice([at, len(home)])
    home[index:index] = [entry] * times


def _rename(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    if isinstance(home, Pairs):
        home[at][0] = draw.choice([draw.choice(home)[0], draw.choice(TEXTS), home[at][0] + "x"])
    else:
        _replace(draw, top, home, at)


def _swap(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    """Two values change places, or one is put where another is."""
    other, there = _place(draw, top)
    mine, theirs = _get(home, at), _get(other, there)
    _put(other, there, Raw(write(mine)))
    if draw.random() < 0.5:
        _put(home, at, Raw(write(theirs)))


def _nest(draw: random.Random, top: list[Any], home: Any, at: int) -> None:
    """The value inside many lists or objects."""
    depth, inner = draw.choice(DEPTHS), write(_get(home, at))
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}"), ('{"type":"Sequence","decoders":[', "]}")])
    _put(home, at, Raw(opening * depth + inner + closing * depth))


MUTATIONS = [_replace, _replace, _replace, _near, _near, _near, _delete, _twice, _rename, _swap, _nest]
