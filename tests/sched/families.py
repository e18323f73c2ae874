"""What a world does between two steps: it forks sequences, resumes them, and has others join their families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Families:
    """The part of a world that knows who is related to whom, and what each was given instead of a sampled token."""

    scheduler: Any
    prompts: dict[int, tuple[list[int], int]]

    def __init__(self) -> None:
        self.given: dict[int, list[int]] = {}  # tokens up to the last one that was not sampled
        self.families: dict[int, list[int]] = {}  # all sequences that a family ever had, by the first
        self.sizes: dict[int, int] = {}  # most that it may have at once
        self.settled: set[int] = set()  # families that get no more
        self.driven: set[int] = set()  # families whose sequences only their beam search may change
        self.on_hold: set[int] = set()  # sequences that get no token from their logits, but are to be resumed
        self.may_change = False  # between the commit and the next plan
        self.queued = 0  # sequences that were forked or joined without room
        self.joined = self.resumed = 0
        self._family_of: dict[int, int] = {}

    def begin_family(self, seq: int, size: int) -> None:
        """A family begins with a sequence."""
        self.families[seq], self.sizes[seq], self._family_of[seq] = [seq], size, seq

    def family(self, seq: int) -> int:
        return self._family_of[seq]

    def live(self) -> list[int]:
        return [seq for seq in self.prompts if self.scheduler.is_live(seq)]

    def relatives(self, seq: int) -> list[int]:
        """The live sequences of its family."""
        return [one for one in self.families[self.family(seq)] if self.scheduler.is_live(one)]

    def is_free(self, seq: int) -> bool:
        """Whether anybody may change its family, and not a beam search alone."""
        return self.family(seq) not in self.driven

    def has_place(self, seq: int) -> bool:
        """Whether its family may get one more, by whoever asks here for it."""
        family = self.family(seq)
        free = self.may_change and self.is_free(seq) and family not in self.settled
        return free and len(self.relatives(seq)) < self.sizes[family]

    def can_fork(self, seq: int) -> bool:
        """Whether it may be forked now."""
        scheduler = self.scheduler
        decoding = scheduler.state(seq) == "decoding" and scheduler.num_computed(seq) < sum(self.size(seq))
        return decoding and self.has_place(seq)

    def can_join(self, seq: int) -> bool:
        """Whether one with tokens of its own, not yet all that it may have, may join its family now."""
        return self.scheduler.times(seq)[1] is not None and self.size(seq)[1] > 1 and self.has_place(seq)

    def can_resume(self, seq: int) -> bool:
        """Whether it waits for a token that is to be handed to it."""
        return self.may_change and seq in self.on_hold and self.scheduler.has_computed(seq)

    def fork(self, seq: int, token: int) -> int:
        """A sequence that goes on with `token` from what another has computed."""
        fork: int = self.scheduler.fork(seq, token)
        computed = self.scheduler.num_computed(seq)
        return self._add(fork, seq, [*self.scheduler.tokens(seq).tolist()[:computed], token])

    def join(self, seq: int, generated: Sequence[int]) -> int:
        """A sequence of the family of another: the same prompt, and other tokens behind it, fewer than it may have."""
        tokens = [*self.prompts[seq][0], *generated]
        joined: int = self.scheduler.join(seq, np.array(tokens, np.int32))
        self.joined += 1
        return self._add(joined, seq, tokens)

    def resume(self, seq: int, token: int) -> None:
        """The next token of one that waits for it."""
        self.scheduler.resume(seq, token)
        self.resumed += 1
        self.on_hold.discard(seq)
        self.given[seq] = self.scheduler.tokens(seq).tolist()
        self._end_if_done(seq)

    def release(self) -> None:
        """Nobody is put on hold any more, and who can go on does, as if it never had waited."""
        for seq in filter(self.can_resume, self.live()):
            self.resume(seq, self.next_token(self.scheduler.tokens(seq)))
        self.on_hold = {seq for seq in self.on_hold if self.scheduler.is_live(seq) and self.scheduler.has_computed(seq)}

    def settle(self, seq: int) -> None:
        """Its family gets no more sequences."""
        self.scheduler.settle(seq)
        self.settled.add(self.family(seq))
        self.sizes[self.family(seq)] = len(self.relatives(seq))

    def _add(self, seq: int, source: int, tokens: list[int]) -> int:
        """Take note of a new sequence of a family."""
        assert self.scheduler.tokens(seq).tolist() == tokens
        self.families[self.family(source)].append(seq)
        self._family_of[seq] = self.family(source)
        self.given[seq] = tokens
        for kept in (self.prompts, self.logits_from, self.salts):
            kept[seq] = kept[source]
        self.scored[seq], self.computed[seq] = [*self.scored[source]], {*self.computed[source]}
        self.queued += self.scheduler.state(seq) == "queued"
        self._end_if_done(seq)
        return seq

    def _end_if_done(self, seq: int) -> None:
        if self.is_done(seq):
            self.end(seq)
