"""The filters, tests and functions a chat template may use: Jinja's and transformers' own, with their work paid for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.filters
from jinja2.runtime import Context

from miro_cy.errors import BadField
from miro_cy.text.budget import (
    ELEMENT,
    MAX_INT_BITS,
    STEP,
    Lazy,
    Refused,
    bounded,
    current,
    measured,
    sized,
    spread,
    text,
)  # fmt: skip
from miro_cy.text.operations import check_method, check_replace

MAX_INDENT = 64
MAX_DECIMALS = 64

#: Jinja's filters that do a bounded amount of work for the size of what they are given. The first few look at one level
#: only, so their input is not walked: templates call them in loops over all messages.
SHALLOW = ("count", "d", "default", "first", "last", "length")
#: These make their input a text.
TEXTUAL = ("capitalize", "e", "escape", "lower", "safe", "title", "upper")
#: These look at every element, and at every character of a text.
WALKED = (
    "abs", "dictsort", "items", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "sort", "unique",
)  # fmt: skip


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that pays for all it may look at and for what it makes."""

    @functools.wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        current.get().charge(STEP)
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Context):  # a Mapping too, but Jinja's own argument
                measured(value)
        return _paid(function(*args, **kwargs))

    return paying


def walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is guarded and goes through texts character by character."""
    inner = guarded(function)

    @functools.wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, range)):
                spread(value)
        return inner(*args, **kwargs)

    return paying


def textual(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of a text, or of what can be printed."""
    return guarded(lambda value: function(text(value)))


def _paid(result: Any) -> Any:
    return Lazy(result) if isinstance(result, Iterator) else sized(result)


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's int or float, of a text that is no longer than a number."""

    def paying(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str) and len(value) > MAX_INT_BITS:
            raise Refused(f"it makes a number of more than {MAX_INT_BITS} characters")
        return bounded(function(value, *args, **kwargs))

    return guarded(paying)


integer, real = _number(jinja2.filters.do_int), _number(jinja2.filters.do_float)


def numeric(test: Callable[..., bool]) -> Callable[..., bool]:
    """A test that takes the remainder, which for a text would format it."""

    def paying(*values: Any) -> bool:
        if not all(isinstance(bounded(value), (int, float)) for value in values):
            raise TypeError("it must be a number")
        return test(*values)

    return guarded(paying)


def rounded(value: Any, precision: int = 0, method: Any = "common") -> float:
    """Jinja's round."""
    if isinstance(precision, int) and abs(precision) > MAX_DECIMALS:
        raise Refused(f"it rounds to more than {MAX_DECIMALS} decimal places")
    return jinja2.filters.do_round(bounded(value), precision, method)


def batch(items: Any, linecount: int, fill_with: Any = None) -> Any:
    """Jinja's batch."""
    if fill_with is not None:
        current.get().charge(ELEMENT * max(0, int(linecount)))
    return jinja2.filters.do_batch(items, linecount, fill_with)


@jinja2.pass_context
def total(context: Context, items: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's sum; `attribute` is one name, not a dotted path."""
    environment: Any = context.environment
    for item in items:
        item = item if attribute is None else environment.getitem(item, attribute)
        start = environment.call_binop(context, "+", start, item)
    return start


@jinja2.pass_context
def formatted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Jinja's format."""
    environment: Any = context.environment
    return environment.call_binop(context, "%", text(value), kwargs or args)


def trim(value: Any, chars: str | None = None) -> str:
    """Jinja's trim."""
    value = text(value)
    check_method(value, "strip", [chars])
    return text(value.strip(chars))


def replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    """Jinja's replace."""
    value, old, new = text(value), text(old), text(new)
    check_replace(value, old, new)
    return text(value.replace(old, new, -1 if count is None else count))


def joined(items: Any, separator: Any) -> str:
    """separator.join(items), each as text."""
    separator = text(separator)
    parts: list[str] = []
    for item in items:
        current.get().charge(len(separator))
        parts.append(text(item))
    return separator.join(parts)


@jinja2.pass_environment
def join(environment: jinja2.Environment, items: Any, d: Any = "", attribute: str | int | None = None) -> str:
    """Jinja's join; `attribute` is one name, not a dotted path."""
    if attribute is not None:
        items = (environment.getitem(item, attribute) for item in items)
    return joined(items, d)


def concatenated(parts: list[Any]) -> str:
    """The ~ operator."""
    return joined(parts, "")


def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's indent, by at most MAX_INDENT characters."""
    prefix = width if isinstance(width, str) else " " * min(int(width), MAX_INDENT + 1)
    if len(prefix) > MAX_INDENT:
        raise Refused(f"it indents by more than {MAX_INDENT} characters")
    lines = (text(value) + "\n").splitlines()
    current.get().charge((ELEMENT + len(prefix)) * len(lines))
    rest = [prefix + line if line or blank else line for line in lines[1:]]
    return "\n".join([(prefix if first else "") + lines[0], *rest])


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' tojson: no HTML escapes, no sorting. Nested at most as deep as Python's recursion limit."""
    if indent is not None and not 0 <= int(indent) <= MAX_INDENT:
        raise Refused(f"it indents JSON by more than {MAX_INDENT} characters")
    if separators is not None and sum(len(item) for item in separators) > MAX_INDENT:
        raise Refused(f"its JSON separators have more than {MAX_INDENT} characters")
    current.get().walk(value, printing=True)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, check_circular=False
    )
    return joined(encoder.iterencode(value), "")  # piece by piece, as each line is indented by its depth


def raise_exception(message: object = "") -> None:
    """How a template refuses a conversation (roles that do not alternate, say)."""
    raise BadField(f"the chat template refuses these messages: {text(message):.300}", field="messages")


def strftime_now(layout: str) -> str:
    """The local date and time."""
    if len(layout) > 64:
        raise Refused("its date layout has more than 64 characters")
    return datetime.now().strftime(layout)
