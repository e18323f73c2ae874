"""What a chat template may do to values: the attributes and methods it may use, and what its operations cost.

Each check runs before the operation it is about, as Python's own cannot be interrupted.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import BlockReference, LoopContext, Macro, TemplateReference
from jinja2.utils import Cycler, Joiner, Namespace

from miro_cy.text.budget import ELEMENT, MAX_INT_BITS, STEP, Refused, bounded, current, measured, spread, text

#: Characters compared for a unit.
SCAN = 16

# Left out are methods that make much of little (center, expandtabs), and those that make bytes.
_TEXT = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
    "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
# Python looks for texts from the right, and for each character among those to strip, in the product of both lengths.
_PRODUCT = frozenset({"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip"})
_ATTRIBUTES: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _TEXT),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    (Mapping, frozenset({"copy", "get", "items", "keys", "values"})),
    ((int, float), frozenset({"is_integer"})),
)
#: Jinja's own objects; the environment hides what begins with an underscore.
_OBJECTS = (BlockReference, Cycler, Joiner, LoopContext, Macro, Namespace, TemplateReference, Undefined)
_CALLABLE = (BlockReference, BuiltinMethodType, FunctionType, Joiner, LoopContext, Macro, MethodType, type, Undefined)
# A width of four digits, one taken from an argument, or one inside the braces of another.
_WIDE_FORMAT = re.compile(r"\*|\d{4}|\{[^}]*\{")
#: More than what the width or precision of one field adds.
_FIELD = 1000


def offered(owner: object, attribute: str) -> bool:
    """Whether templates may have an attribute of a value."""
    for kind, names in _ATTRIBUTES:
        if isinstance(owner, kind):
            return attribute in names
    return isinstance(owner, _OBJECTS)


def check_call(function: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Charge for what a call may look at. Raises Refused for an object that is no function of the environment's."""
    if not isinstance(function, _CALLABLE):
        raise Refused(f"it calls an object of type {type(function).__name__}")
    if isinstance(function, (Macro, BlockReference)):
        return  # templates themselves
    values = [*args, *kwargs.values()]
    measured(values)
    if not isinstance(function, (BuiltinMethodType, MethodType)):
        return
    owner = function.__self__
    if isinstance(owner, str):
        check_method(owner, function.__name__, values)
    elif isinstance(owner, (list, tuple)):  # count and index compare; index prints what it does not find
        measured(owner)
        current.get().walk(values, printing=True)


def check_method(owner: str, name: str, values: Iterable[Any]) -> None:
    """Charge for a method of a text before it runs."""
    sizes = [len(value) for value in values if isinstance(value, str)]
    times = 1 + max(sizes, default=0) if name in _PRODUCT else 1
    current.get().charge(STEP + (len(owner) * times + sum(sizes)) // SCAN)


def check_replace(source: str, *args: Any) -> None:
    """Charge for source.replace(*args) before it is done."""
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        times = source.count(args[0]) if args[0] else len(source) + 1
        current.get().charge(len(source) + times * len(args[1]))


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for an operation before it is done, or refuse it."""
    budget = current.get()
    budget.charge(STEP)
    bounded(left)
    bounded(right)
    if operator == "%" and isinstance(left, str):
        check_format(left, left.count("%"), right)
    elif operator == "+" and isinstance(left, (str, list, tuple)):
        size = len(right) if isinstance(right, (str, list, tuple)) else 0
        budget.charge((1 if isinstance(left, str) else ELEMENT) * (len(left) + size))
    elif operator == "-" and any(isinstance(value, (KeysView, ItemsView)) for value in (left, right)):
        raise Refused("it subtracts sets")
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise Refused(f"it makes a number of more than {MAX_INT_BITS} bits")
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                budget.charge((1 if isinstance(items, str) else ELEMENT) * len(items) * max(0, times))


def check_format(layout: str, n_fields: int, values: Any) -> None:
    """Charge for a formatting whose every field may print all of the values."""
    if _WIDE_FORMAT.search(layout):
        raise Refused("it formats a number too wide")
    current.get().charge(len(layout) + n_fields * (_FIELD + len(text(values))))


def mapping(items: Any = (), /, **named: Any) -> dict[Any, Any]:
    """dict(), paid for by the element: keys may be made that are slow to tell from each other."""
    made: dict[Any, Any] = {}
    for key, value in [*(items.items() if isinstance(items, Mapping) else spread(items)), *named.items()]:
        current.get().walk(key)
        made[key] = value
    return made


def namespace(items: Any = (), /, **named: Any) -> Namespace:
    """Jinja's namespace."""
    return Namespace(mapping(items, **named))
