"""A scheduler without a model: a fake executor that really stores tokens in the blocks it is told to use."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig

Row = tuple[int, int, int, int, int]  # sequence, first position, tokens, tokens with logits, sampled token


class World:
    """Pool, tables, scheduler, a clock set by hand, and an executor whose next token is a hash of all before it.

    The executor reads its context back from the blocks the tables name, so a block used twice, lost or out of order
    changes the generated tokens. `reference` computes the same tokens without any of it.
    """

    def __init__(
        self, n_blocks: int = 64, block_size: int = 4, n_groups: int = 1, max_context: int = 128, **config: Any
    ) -> None:
        self.config = SchedulerConfig(**config)
        self.pool = BlockPool(n_blocks, block_size)
        self.tables = BlockTables(n_groups, self.config.max_num_seqs, -(-max_context // block_size))
        self.now = 100.0
        self.scheduler = Scheduler(self.pool, self.tables, self.config, max_context=max_context, clock=lambda: self.now)
        self.kv = np.full((n_blocks, block_size), -1, np.int64)
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.logits_from: dict[int, int] = {}
        self.log: list[list[Row]] = []

    @staticmethod
    def next_token(context: NDArray[Any]) -> int:
        return zlib.crc32(np.ascontiguousarray(context, np.int64).tobytes()) % 997

    def reference(self, seq: int) -> list[int]:
        prompt, max_new = self.prompts[seq]
        tokens = list(prompt)
        for _ in range(max_new):
            tokens.append(self.next_token(np.array(tokens)))
        return tokens

    def add(self, n_prompt: int, max_new: int, *, logits_from: int = -1) -> int:
        start = 1000 + 100 * len(self.prompts)
        prompt = np.arange(start, start + n_prompt, dtype=np.int32)
        seq = self.scheduler.add(prompt, max_new, logits_from=logits_from)
        self.prompts[seq] = (prompt.tolist(), max_new)
        self.logits_from[seq] = logits_from
        self.scored[seq] = []
        return seq

    def context(self, slot: int, end: int) -> list[NDArray[np.int64]]:
        """What the blocks of each group hold at positions 0 .. end - 1."""
        size = self.pool.block_size
        position = np.arange(end)
        return [self.kv[table[slot, position // size], position % size] for table in self.tables.array]

    def forward(self) -> NDArray[np.int32]:
        """Run the planned view; returns the sampled token of each row."""
        view, size = self.scheduler.view, self.pool.block_size
        ids = self.scheduler.planned()
        assert len(ids) == len(set(ids)) == view.n_rows
        assert view.n_tokens <= view.max_tokens
        assert view.n_logits <= self.scheduler.max_logits
        sampled, log = np.full(view.n_rows, -1, np.int32), []
        for i, (seq, (slot, first, n_tok, n_log)) in enumerate(zip(ids, view.rows(), strict=True)):
            tokens, end = self.scheduler.tokens(seq), first + n_tok
            assert first == self.scheduler.num_computed(seq)
            for position in range(first, end):
                self.kv[self.tables.array[:, slot, position // size], position % size] = tokens[position]
            for held in self.context(slot, end):
                assert held.tolist() == tokens[:end].tolist(), f"sequence {seq} reads another's cache"
            if self.logits_from[seq] >= 0:
                n_prompt = len(self.prompts[seq][0])
                self.scored[seq] += [p for p in range(end - n_log, end) if p < n_prompt]
            else:
                assert n_log == (end == len(tokens)), "logits exactly at the last token"
            if end == len(tokens) < sum(self.size(seq)):
                assert n_log > 0
                sampled[i] = self.next_token(tokens[:end])
            log.append((seq, first, n_tok, n_log, int(sampled[i])))
        self.log.append(log)
        return sampled

    def size(self, seq: int) -> tuple[int, int]:
        prompt, max_new = self.prompts[seq]
        return len(prompt), max_new

    def cost(self) -> float:
        """Seconds of a step: a pass over the weights and a little a token."""
        return 0.010 + 0.001 * self.scheduler.view.n_tokens

    def step(self) -> list[int] | None:
        """One step; returns the sequences in it, in row order, or None when there was nothing to do."""
        if self.scheduler.plan() is None:
            return None
        sampled, seconds = self.forward(), self.cost()
        self.now += seconds
        self.scheduler.commit(sampled, seconds)
        return self.reap()

    def reap(self) -> list[int]:
        """Finish what reached its length, as the engine does after each step."""
        ids = self.scheduler.planned()
        for seq in ids:
            if self.scheduler.is_live(seq) and self.is_done(seq):
                self.outputs[seq] = self.scheduler.tokens(seq).tolist()
                self.scheduler.finish(seq)
        return ids

    def is_done(self, seq: int) -> bool:
        n_prompt, max_new = self.size(seq)
        if max_new == 0:
            return self.scheduler.num_computed(seq) == n_prompt
        return len(self.scheduler.tokens(seq)) == n_prompt + max_new

    def run(self, max_steps: int = 2000) -> int:
        """Step until nothing is left, checking conservation after each (promise 3); returns the steps it took."""
        for n in range(max_steps):
            if self.step() is None:
                assert not self.scheduler.has_work
                return n
            self.scheduler.check_integrity()
        raise AssertionError(f"still busy after {max_steps} steps")

    def check_outputs(self) -> None:
        for seq, output in self.outputs.items():
            assert output == self.reference(seq), f"sequence {seq} went wrong"


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World
