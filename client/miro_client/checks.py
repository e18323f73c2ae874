"""What a setting or a field must be, and how an error shows what it was instead.

A leaf (standard library only) that engine, worker and clients share. A value comes from whoever calls: it may have no
text (Python writes no integer of more than 4,300 digits), compare with nothing, or raise when it is shown. Only the
typed error may come of that. So types are tested first, and nothing else is asked of a value of another type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from miro_client.errors import ConfigError, MiroError

#: The largest whole number of many settings and fields: what fits 32 bits.
MAX_INT32 = 2**31 - 1


def shown(value: object, most: int = 80) -> str:
    """A value as an error message shows it: its repr, at most `most` characters of it. Never raises."""
    try:
        return f"{value!r:.{most}}"
    except Exception:  # whatever a __repr__ of somebody else's raises
        return f"a value of type {type(value).__name__}"[:most]


def check_int(name: str, value: object, low: int, high: int, *, error: type[MiroError] = ConfigError) -> None:
    """Raise `error` naming the field and both limits unless `value` is an int, no bool, from low to high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise error(f"{name} must be an integer between {low} and {high}, not {shown(value)}", field=name)


def check_number(
    name: str, value: object, high: float, *, zero: bool = False, error: type[MiroError] = ConfigError
) -> None:
    """Raise `error` naming the field and both limits unless `value` is an int or float above 0 (or 0, where `zero`), at
    most `high`. NaN is neither.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 < value <= high or (zero and value == 0)):  # type: ignore[operator]
        least = "at least" if zero else "above"
        # All digits: a limit rounded to six of them may be one that is refused.
        most = f"{high:.17g}"
        raise error(f"{name} must be a number, {least} 0 and at most {most}, not {shown(value)}", field=name)


def check_bool(name: str, value: object, *, error: type[MiroError] = ConfigError) -> None:
    """Raise `error` naming the field unless `value` is a bool."""
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, not {shown(value)}", field=name)


def check_choice(
    name: str, value: object, choices: tuple[object, ...], *, error: type[MiroError] = ConfigError
) -> None:
    """Raise `error` naming the field and the choices unless `value` is one of them, of the same type too."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise error(f"{name} must be one of {listed}, not {shown(value)}", field=name)


def check_items(
    name: str, value: object, most: int, *, what: str = "integers", error: type[MiroError] = ConfigError
) -> list[Any]:
    """The items of an iterable, whatever they are. Raises `error` naming the field for what is none (text, bytes and
    maps do not count), cannot be gone through, or holds more than `most`; so an endless one ends here.
    """
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise error(f"{name} must be a list of {what}, not {shown(value)}", field=name)
    try:
        items = list(islice(value, most + 1))
    except Exception as problem:  # whatever an __iter__ of somebody else's raises
        raise error(f"{name} must be a list of {what}, not {shown(value)}", field=name) from problem
    if len(items) > most:
        raise error(f"{name} takes at most {most} {what}, got more", field=name)
    return items
