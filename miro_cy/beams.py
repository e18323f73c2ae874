"""The beams of one request as sequences of the scheduler: how a beam search goes on in blocks of KV cache.

    a step's rows        -> take: a row for each live beam, in whatever step it comes
    the last one is here -> advance: the parent's sequence takes its first child's token, other children are forks of
                            it, who has no child ends
    no step can be made  -> give_up_one: a beam that only waits for others leaves its blocks to them

All beams of a request advance together, so one that was preempted is waited for. The others have their rows, and hold
their blocks only in order not to compute them again: they never keep another sequence from running for ever. A beam
that gave its blocks up has no sequence; its children join the family as new ones and are computed from the start, or
from what the prefix index still has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miro_cy.sampling.beam import BeamSearch, Move, Row


class Sequences(Protocol):
    """What of a scheduler is needed here; see there."""

    def has_computed(self, seq: int) -> bool: ...
    def resume(self, seq: int, token: int) -> None: ...
    def fork(self, seq: int, token: int) -> int: ...
    def join(self, seq: int, tokens: NDArray[np.int32]) -> int: ...
    def finish(self, seq: int) -> None: ...


class Beams:
    """A beam search, the prompt it began with, and which sequence each live beam has."""

    def __init__(self, search: BeamSearch, prompt: NDArray[np.int32], seq: int, sequences: Sequences) -> None:
        self.search = search
        self._prompt = prompt
        self._sequences = sequences
        self._seqs: list[int | None] = [seq]  # None: it gave up its blocks, and its row is here
        self._rows: list[Row | None] = [None]

    @property
    def seqs(self) -> list[int]:
        """The live sequences; at least one until the search is done."""
        return [seq for seq in self._seqs if seq is not None]

    def take(self, seq: int, row: Row) -> None:
        """The most likely next tokens (BeamSearch.row_size) of a beam; the same again when it was computed again."""
        self._rows[self._seqs.index(seq)] = row

    @property
    def is_ready(self) -> bool:
        """Whether the rows of all live beams are here."""
        return all(row is not None for row in self._rows)

    def advance(self) -> None:
        """Go on by one token, between two steps, once it is ready. When the search is done no sequence is left."""
        moves = self.search.advance([row for row in self._rows if row is not None])
        if self.search.done:
            for seq in self.seqs:
                self._sequences.finish(seq)
            self._seqs, self._rows = [], []
        else:
            self._seqs = self._move(moves)
            self._rows = [None] * len(moves)

    def give_up_one(self) -> bool:
        """End the sequence of a beam that waits for others; False when there is none to end."""
        if not self.is_ready:
            for at in reversed(range(len(self._seqs))):
                seq = self._seqs[at]
                if seq is not None and self._rows[at] is not None:
                    self._sequences.finish(seq)
                    self._seqs[at] = None
                    return True
        return False

    def _move(self, moves: list[Move]) -> list[int | None]:
        """The sequences of the next live beams; those of the present ones that are not among them end."""
        sequences = self._sequences
        parents = {at for at, _ in moves}
        # Who was preempted after its row had come has to be computed again in any case: its children take its place.
        going = {
            at: seq
            for at, seq in enumerate(self._seqs)
            if at in parents and seq is not None and sequences.has_computed(seq)
        }
        ending = [seq for seq in self.seqs if seq not in going.values()]
        member = next(iter(going.values())) if going else ending[-1]  # whom the children of others can join
        for seq in ending:
            if seq != member:
                sequences.finish(seq)
        resumed: set[int] = set()
        seqs: list[int | None] = []
        for index, (at, token) in enumerate(moves):
            if at not in going:
                tokens = np.concatenate([self._prompt, np.array(self.search.tokens(index), np.int32)])
                seq = sequences.join(member, tokens)
                if member in ending:
                    sequences.finish(member)
                    member = seq
            elif at in resumed:
                seq = sequences.fork(going[at], token)
            else:
                seq = going[at]
                sequences.resume(seq, token)
                resumed.add(at)
            seqs.append(seq)
        return seqs
