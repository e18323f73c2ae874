"""How much work a chat template may do, and the helpers that charge for it.

Every loop round, call, and character or element produced draws on one `Budget` a rendering. Anything that Python would
visit in one go (str, ==, hash, sort) is walked and paid for first: no single step between two charges may take long.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2 import Undefined

#: Work one rendering may do, in units of about one character copied.
MAX_WORK = 64 * 1024 * 1024
MAX_SECONDS = 5.0
#: Units of a loop round, a call or a value looked at, and of an element copied.
STEP, ELEMENT = 64, 8
#: How many levels a value may have; Python's own stack ends somewhere beyond.
MAX_NESTING = 256
MAX_INT_BITS = 4096

CONTAINERS = (Mapping, list, tuple, KeysView, ValuesView, ItemsView)
_PRINTABLE = (str, bool, int, float, type(None), Undefined)


class Refused(Exception):
    """The template did, or would have done, more than it may."""


class OutputTooLong(Exception):
    """The text is longer than the caller wanted."""


class Budget:
    """What is left of one rendering's work and time."""

    def __init__(self) -> None:
        self._left = MAX_WORK
        self._deadline = time.monotonic() + MAX_SECONDS

    def charge(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise Refused(f"it needs more than {MAX_WORK} units of work")
        if time.monotonic() > self._deadline:
            raise Refused(f"it takes longer than {MAX_SECONDS:g} s")

    def walk(self, value: object, *, printing: bool = False) -> None:
        """Charge for everything reachable in a value.

        A list that holds another twice, nested forty deep, is small in memory and endless to look through.
        printing: refuse objects whose text might visit values that cannot be seen from here.
        """
        level, depth = [value], 0
        self.charge(STEP)
        while level:
            if depth == MAX_NESTING:
                raise Refused(f"it nests values deeper than {MAX_NESTING}")
            below: list[object] = []
            for item in level:
                if isinstance(item, str):
                    self.charge(len(item))
                elif isinstance(item, Mapping):
                    self.charge(2 * STEP * len(item))
                    below += [*item.keys(), *item.values()]
                elif isinstance(item, CONTAINERS):
                    self.charge(STEP * len(item))
                    below += item
                elif printing and not isinstance(item, _PRINTABLE):
                    raise Refused(f"it prints an object of type {type(item).__name__}")
            level, depth = below, depth + 1


current: ContextVar[Budget] = ContextVar("miro_template_budget")


def measured(value: Any) -> Any:
    """The value, once all that is reachable in it has been paid for."""
    if isinstance(value, CONTAINERS):
        current.get().walk(value)
    return value


def bounded(value: Any) -> Any:
    """The value, unless it is a number so large that arithmetic takes long."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise Refused(f"it makes a number of more than {MAX_INT_BITS} bits")
    return value


def spread(value: Any) -> Any:
    """The value, its elements paid for; a text's are its characters."""
    if isinstance(value, (str, range, *CONTAINERS)):
        current.get().charge(STEP * len(value))
    return value


def sized(value: Any) -> Any:
    """The value, paid for by its own length alone."""
    if isinstance(value, str):
        current.get().charge(STEP + len(value))
    elif isinstance(value, (Mapping, list, tuple)):
        current.get().charge(STEP + ELEMENT * len(value))
    return value


def text(value: Any) -> str:
    """str(value), paid for."""
    if isinstance(value, str):
        current.get().charge(STEP + len(value))
        return value
    current.get().walk(value, printing=True)
    string = str(value)
    current.get().charge(len(string))
    return string


class Lazy:
    """What a filter yields, each item paid for; what looks at an iterator could not be charged for its items before."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        current.get().walk(item)
        return item
