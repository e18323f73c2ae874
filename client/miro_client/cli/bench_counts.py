"""Whole numbers as an option of `miro bench` takes them: `1-8,16,32`."""

from __future__ import annotations

import re
from typing import Any

import click

#: Numbers that one option's value may stand for: a range of millions would be measured until the end of time.
MAX_COUNTS = 256
_PART = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", re.ASCII)


class Counts(click.ParamType):
    """Numbers and ranges between low and high, with commas between them; converts to a tuple of int, in their order."""

    name = "list"

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):  # converted already
            return value
        counts: list[int] = []
        for part in str(value).split(","):
            match = _PART.fullmatch(part.strip())
            if match is None:
                self.fail(f"{part.strip()!r:.80} is neither a number nor a range such as 1-8", param, ctx)
            first = int(match[1])
            last = int(match[2] or match[1])
            if not self._low <= first <= last <= self._high:
                self.fail(f"{part.strip()!r:.80} does not go up between {self._low} and {self._high}", param, ctx)
            if len(counts) + last - first >= MAX_COUNTS:
                self.fail(f"{str(value)!r:.80} stands for more than {MAX_COUNTS} numbers", param, ctx)
            counts += range(first, last + 1)
        return tuple(counts)


def joined(ctx: click.Context, param: click.Parameter, value: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Callback of a repeated option of Counts: all its numbers, each once."""
    counts = tuple(dict.fromkeys(count for counts in value for count in counts))
    if len(counts) > MAX_COUNTS:
        raise click.BadParameter(f"these are more than {MAX_COUNTS} numbers", ctx, param)
    return counts
