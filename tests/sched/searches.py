"""Beam searches in a world: the engine's own beams, over logits that are hashes of all tokens before."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miro_cy.beams import Beams
from miro_cy.sampling.beam import BeamSearch, Hypothesis, Row

VOCAB, STOPS = 12, (0, 1)


def make_search(family: int, width: int, max_new: int) -> BeamSearch:
    """What a family searches for."""
    return BeamSearch(width, max_new, STOPS, early_stopping=(False, True, "never")[family % 3])


def row_after(tokens: NDArray[Any], search: BeamSearch) -> Row:
    """The likeliest tokens after others."""
    before = zlib.crc32(np.ascontiguousarray(tokens, np.int64).tobytes())
    costs = sorted((zlib.crc32(b"%d" % token, before), token) for token in range(VOCAB))
    return [(token, -cost / 2**30) for cost, token in costs[: search.row_size]]


class Sequences:
    """A world as beams see it."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.has_computed, self.finish = world.scheduler.has_computed, world.scheduler.finish
        self.resume, self.fork = world.resume, world.fork

    def join(self, seq: int, tokens: NDArray[np.int32]) -> int:
        prompt = self._world.prompts[seq][0]
        assert tokens[: len(prompt)].tolist() == prompt
        joined: int = self._world.join(seq, tokens[len(prompt) :].tolist())
        return joined


class Searches:
    """The searches of a world, known by the families that they drive; a step goes as in the engine's core."""

    def __init__(self, world: Any) -> None:
        self.found: dict[int, list[Hypothesis]] = {}  # of those that came to their end
        self.given_up = 0  # sequences, so that others can be computed
        self._world = world
        self._live: dict[int, tuple[Beams, BeamSearch]] = {}
        self._ready: list[int] = []

    def begin(self, seq: int, width: int) -> None:
        """The family that begins with a sequence is a search's."""
        prompt, max_new = self._world.prompts[seq]
        search = make_search(seq, width, max_new)
        self._live[seq] = Beams(search, np.array(prompt, np.int32), seq, Sequences(self._world)), search
        self._world.driven.add(seq)

    def __contains__(self, seq: int) -> bool:
        return self._world.family(seq) in self._live

    def take(self, seq: int) -> None:
        """A step has computed the last token of a sequence."""
        family = self._world.family(seq)
        beams, search = self._live[family]
        beams.take(seq, row_after(self._world.scheduler.tokens(seq), search))
        if beams.is_ready:
            self._ready.append(family)

    def go_on(self) -> None:
        """The step is committed."""
        while self._ready:
            family = self._ready.pop(0)
            beams, search = self._live[family]
            beams.advance()
            assert sorted(beams.seqs) == sorted(self._world.relatives(family))
            if search.done:
                self.found[family] = search.hypotheses()
                self.end(family)

    def end(self, seq: int) -> None:
        """End a search now, whichever of its sequences is named."""
        family = self._world.family(seq)
        for one in self._live.pop(family)[0].seqs:
            self._world.scheduler.finish(one)
        self._ready = [other for other in self._ready if other != family]

    def give_up(self) -> bool:
        """Nothing can be computed: the latest search that can ends a sequence; whether there is one."""
        for beams, _ in reversed(self._live.values()):
            if beams.give_up() is not None:
                self.given_up += 1
                return True
        return False

    def most_steps(self, seq: int) -> int:
        """Steps that its search may need yet: before each token, all beams one after another from their beginning."""
        n_prompt, max_new = self._world.size(seq)
        family = self._world.family(seq)
        return n_prompt + max_new * self._world.sizes[family] * (n_prompt + max_new + 1)

    def check(self) -> None:
        """What was found is what a search finds that has all it wants."""
        for family, found in self.found.items():
            prompt, max_new = self._world.prompts[family]
            search, beams = make_search(family, self._world.sizes[family], max_new), [prompt]
            while not search.done:
                moves = search.advance([row_after(np.array(tokens), search) for tokens in beams])
                beams = [[*beams[at], token] for at, token in moves]
            assert found == search.hypotheses(), f"the search of family {family} went wrong"
