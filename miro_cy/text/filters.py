"""The filters, tests and functions a chat template may use: Jinja's and transformers' own, with their work paid for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.runtime import Context

from miro_cy.errors import BadField
from miro_cy.text.budget import STEP, Refused, current, measured, sized, text

MAX_INDENT = 64

#: Jinja's filters that do a bounded amount of work for the size of what they are given. The first few look at one level
#: only, so their input is not walked: templates call them in loops over all messages.
SHALLOW = ("count", "d", "default", "first", "last", "length")
WALKED = (
    "abs", "capitalize", "dictsort", "e", "escape", "float", "int", "items", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper",
)  # fmt: skip


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that pays for all it may look at and for what it makes."""

    @functools.wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        current.get().charge(STEP)
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Context):  # a Mapping too, but Jinja's own argument
                measured(value)
        return sized(function(*args, **kwargs))

    return paying


def check_replace(source: str, *args: Any) -> None:
    """Charge for source.replace(*args) before it is done."""
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        times = source.count(args[0]) if args[0] else len(source) + 1
        current.get().charge(len(source) + times * len(args[1]))


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
    value = text(value)
    current.get().charge(len(prefix) * (value.count("\n") + 1))
    lines = (value + "\n").splitlines()
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
    return text(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))


def raise_exception(message: object = "") -> None:
    """How a template refuses a conversation (roles that do not alternate, say)."""
    raise BadField(f"the chat template refuses these messages: {message!s:.300}", field="messages")


def strftime_now(layout: str) -> str:
    """The local date and time."""
    if len(layout) > 64:
        raise Refused("its date layout has more than 64 characters")
    return datetime.now().strftime(layout)
