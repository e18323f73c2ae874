"""Beams over a scheduler that preempts whom and when it likes: the search they drive is the plain one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy.beams import Beams
from miro_cy.sampling.beam import BeamSearch

PROMPT = np.array([3, 1, 4], np.int32)


def row_after(tokens, vocab):
    """A row that depends on the tokens alone."""
    row = np.random.default_rng([int(token) for token in tokens]).standard_normal(vocab) - 3
    return [(int(i), float(row[i])) for i in np.argsort(-row, kind="stable")]


class Pool:
    """Sequences of which any may lose what it has computed; a family of `most`, and room to compute for `running`."""

    def __init__(self, rng, most, running):
        self.rng, self.most, self.running = rng, most, running
        self.tokens, self.computed = {0: list(PROMPT)}, {0: 0}
        self.next_id = 1

    def has_computed(self, seq):
        return self.computed[seq] == len(self.tokens[seq])

    def resume(self, seq, token):
        assert self.has_computed(seq)
        self.tokens[seq].append(token)

    def fork(self, seq, token):
        assert self.computed[seq] == len(self.tokens[seq]) - 1
        return self._add([*self.tokens[seq][:-1], token], self.computed[seq])

    def join(self, seq, tokens):
        assert seq in self.tokens
        return self._add(tokens.tolist(), 0)

    def finish(self, seq):
        del self.tokens[seq], self.computed[seq]

    def _add(self, tokens, computed):
        seq, self.next_id = self.next_id, self.next_id + 1
        self.tokens[seq], self.computed[seq] = tokens, computed
        assert len(self.tokens) <= self.most
        return seq

    def step(self):
        """Who gets a row: of those that want one, some, and there is room for few beside those that hold blocks."""
        holding = [seq for seq, n in self.computed.items() if n > 0]
        rows = []
        for seq in self.tokens:
            if self.has_computed(seq) or (seq not in holding and len(holding) >= self.running):
                continue
            if seq not in holding:
                holding.append(seq)
            if self.rng.random() < 0.8:
                self.computed[seq] = len(self.tokens[seq])
                rows.append(seq)
        return rows

    def preempt(self):
        for seq in self.tokens:
            if self.rng.random() < 0.1:
                self.computed[seq] = 0


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(2, 5),
    running=st.integers(1, 6),
    vocab=st.integers(3, 12),
    stops=st.sets(st.integers(0, 3), max_size=2),
    preempting=st.booleans(),
)
def test_the_hypotheses_do_not_depend_on_who_is_preempted(seed, width, running, vocab, stops, preempting):
    def search():
        return BeamSearch(width, 8, stops, early_stopping="never")

    plain, prefixes = search(), [[]]
    while not plain.done:
        moves = plain.advance([row_after([*PROMPT, *prefix], vocab)[: plain.row_size] for prefix in prefixes])
        prefixes = [[*prefixes[at], token] for at, token in moves]

    rng = np.random.default_rng(seed)
    pool, shared = Pool(rng, width, running), search()
    beams = Beams(shared, PROMPT, 0, pool)
    idle = 0
    while not shared.done:
        rows = pool.step()
        for seq in rows:
            beams.take(seq, row_after(pool.tokens[seq], vocab)[: shared.row_size])
        if beams.is_ready:
            beams.advance()
        elif not rows:
            computing = [seq for seq, n in pool.computed.items() if n > 0 and not pool.has_computed(seq)]
            idle = idle + 1 if beams.give_up() is None else 0
            assert computing or idle < 50, "nobody can run, and nobody gives up a place"
        assert sorted(beams.seqs) == sorted(pool.tokens)
        if preempting:
            pool.preempt()
    assert shared.hypotheses() == plain.hypotheses()


def test_nobody_gives_up_what_all_have_computed():
    pool = Pool(np.random.default_rng(1), 2, 2)
    beams = Beams(BeamSearch(2, 5), PROMPT, 0, pool)
    assert beams.give_up() is None
    pool.computed[0] = 3
    beams.take(0, [(5, -1.0), (6, -2.0)])
    assert beams.is_ready
    assert beams.give_up() is None
    beams.advance()
    assert [pool.tokens[seq] for seq in beams.seqs] == [[3, 1, 4, 5], [3, 1, 4, 6]]
    pool.computed[0] = 4
    beams.take(0, [(7, -1.0), (8, -2.0)])
    assert beams.give_up() == 0
    assert beams.seqs == [1]
    assert beams.give_up() is None
    pool.computed[1] = 4
    beams.take(1, [(9, -9.0), (8, -9.5)])
    beams.advance()
    # both children are those of the beam that gave up
    assert [pool.tokens[seq] for seq in beams.seqs] == [[3, 1, 4, 5, 7], [3, 1, 4, 5, 8]]
    assert set(beams.seqs) == set(pool.tokens)


def test_a_row_for_a_sequence_that_is_not_there_is_a_mistake():
    beams = Beams(BeamSearch(2, 5), PROMPT, 0, Pool(np.random.default_rng(1), 2, 2))
    with pytest.raises(ValueError, match="not in list"):
        beams.take(7, [(1, -1.0)])
