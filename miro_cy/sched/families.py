"""Families: a sequence, and those that are forked from it and from its forks. One a request.

What a family may come to have is promised to it when it arrives, and counts like what it has: towards the queue's
limit while it waits, and from its admission on towards the sequences and blocks that newcomers must leave. So a fork
finds its place, unless its family is larger than all there is, and then no other family runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from miro_cy.errors import InternalError


@dataclass(frozen=True, slots=True)
class Family:
    """size: sequences that it may have at once; live: those that it has; fork_blocks: blocks that a fork may take."""

    size: int
    fork_blocks: int
    live: int = 1
    settled: bool = False
    admitted: bool = False

    @property
    def promised_blocks(self) -> int:
        """What the forks that may still come may take."""
        return (self.size - self.live) * self.fork_blocks


class Families:
    """Known by the ids of the sequences that they began with. One thread."""

    def __init__(self) -> None:
        self._families: dict[int, Family] = {}
        self.n_waiting = 0  # sequences of families that wait for their first admission, promised ones included
        self.n_admitted = 0  # of the others, alike
        self.promised_blocks = 0  # what forks of admitted families may take

    def add(self, family: int, size: int, fork_blocks: int) -> None:
        """A family of one begins to wait; it may come to have `size` sequences, with so many blocks for each fork."""
        self._families[family] = one = Family(size, fork_blocks)
        self._count(one, 1)

    def size(self, family: int) -> int:
        """Sequences that it may have at once."""
        return self._families[family].size

    def promised_to(self, family: int) -> int:
        """Blocks that its forks may take."""
        return self._families[family].promised_blocks

    def admit(self, family: int) -> None:
        """Its first sequence runs."""
        self._change(family, admitted=True)

    def fork(self, family: int) -> None:
        """It gets one sequence more. Raises InternalError when it may have no more."""
        one = self._families[family]
        if one.live == one.size:
            raise InternalError(f"family {family} has all its {one.size} sequences")
        self._change(family, live=one.live + 1)

    def settle(self, family: int) -> None:
        """No sequence joins it from now on."""
        self._change(family, settled=True)

    def leave(self, family: int) -> bool:
        """One of its sequences has ended; whether it was the last one."""
        one = self._families[family]
        if one.live > 1:
            self._change(family, live=one.live - 1)
            return False
        self._count(self._families.pop(family), -1)
        return True

    def _change(self, family: int, **fields: Any) -> None:
        one = self._families[family]
        self._count(one, -1)
        self._families[family] = one = replace(one, **fields)
        if one.settled:
            self._families[family] = one = replace(one, size=one.live)
        self._count(one, 1)

    def _count(self, one: Family, sign: int) -> None:
        if one.admitted:
            self.n_admitted += sign * one.size
            self.promised_blocks += sign * one.promised_blocks
        else:
            self.n_waiting += sign * one.size
