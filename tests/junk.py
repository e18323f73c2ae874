"""Values of every kind that a caller may put where another is meant; for property tests of all that takes arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from miro_client.errors import ConfigError, MiroError

HUGE = 10**5000  # more digits than Python agrees to write


def _refuse(*_: object, **__: object) -> Any:
    raise RuntimeError("this object answers nothing")


#: Special methods that an object of somebody else's may have, and that may raise.
SPECIAL = (
    *("__repr__", "__str__", "__format__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__"),
    *("__iter__", "__getitem__", "__contains__", "__index__", "__int__", "__float__", "__bool__", "__array__"),
    *("__fspath__", "tolist", "keys", "items"),
)
Hostile: Any = type("Hostile", (), {**dict.fromkeys(SPECIAL, _refuse), "__hash__": object.__hash__})
Shy: Any = type("Shy", (), {"__repr__": _refuse})


def deep(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def endless(first: object, then: Exception | None) -> Iterator[object]:
    """An iterator that never ends, or that fails after its first item."""
    yield first
    if then is not None:
        raise then
    yield from itertools.repeat(first)


#: What may be looked at any number of times.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 32, 2**31, 2**63, 2**64, 2**70, HUGE, -HUGE, 0.0, -0.0, 0.5, 1e308, -1.5,
    float("nan"), float("inf"), -float("inf"), 1j, "", "7", "fp16", "4GiB", "\ud800", "\0", "x" * 10_000, b"", b"1",
    bytearray(b"12"), memoryview(b"12"), (), (1,), [], [1], [HUGE], [[1]], [None], ["a"], {}, {"a": 1}, {1},
    frozenset(), range(3), range(10**12), slice(1), int, object, len, ..., NotImplemented, Decimal(1), Decimal("NaN"),
    Fraction(1, 3), np.int64(3), np.float32(0.5), np.float64("nan"), np.bool_(True), np.str_("a"), np.array(1),
    np.array([1, 2]), np.array([[1.0]]), np.array([None, HUGE], object), np.array("a"), np.array([], np.int32),
    np.datetime64("nat"), Path("x"), ConfigError, KeyError("x"), object(), Hostile(), Shy(), [Hostile()],
    {"a": Hostile()}, (Shy(), HUGE), deep(100_000),
]  # fmt: skip
#: What is used up by it.
MAKERS: list[Callable[[], Any]] = [
    lambda: endless(1, None),
    lambda: endless("a", None),
    lambda: endless(1, ValueError("no")),
    lambda: (i for i in ()),
]
JUNK = st.one_of(
    st.sampled_from(VALUES),
    st.sampled_from(MAKERS).map(lambda make: make()),
    st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8), st.lists(st.integers(), max_size=3),
    st.complex_numbers(), st.decimals(), st.fractions(),
)  # fmt: skip


def check(make: Callable[..., Any], arguments: dict[str, Any], wanted: Any, *names: str) -> None:
    """Call it: it takes the arguments, or raises a wanted type of error, none derived from it, that can be read and
    whose field begins with one of the names.
    """
    made: object = None
    refused: MiroError | None = None
    try:
        made = make(**arguments)
    except wanted as error:
        refused = error
    if refused is None:
        if (close := getattr(made, "close", None)) is not None:
            close()
        return
    assert type(refused) in (wanted if isinstance(wanted, tuple) else (wanted,))
    assert refused.field is not None
    assert refused.field.startswith(names)
    assert 5 < len(refused.message) < 600
