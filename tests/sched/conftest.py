"""A scheduler without a model: a fake executor that really stores tokens in the blocks it is told to use."""

from __future__ import annotations

import runpy
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig

Row = tuple[int, int, int, int, int]  # sequence, first position, tokens, tokens with logits, sampled token
FOLDER = Path(__file__).parent
Families: Any = runpy.run_path(str(FOLDER / "families.py"))["Families"]
Searches = runpy.run_path(str(FOLDER / "searches.py"))["Searches"]


class World(Families):
    """Pool, tables, scheduler, a clock set by hand, and an executor whose next token is a hash of all before it.

    What the executor stores for a token is a digest of all tokens up to it and of the sequence's salt. It reads its
    whole context back from the blocks the tables name, so a block used twice, lost, out of order, written by one that
    shares it, or taken from another prefix or salt is found at once. `reference` computes the tokens without any of it.
    """

    def __init__(
        self,
        n_blocks: int = 64,
        block_size: int = 4,
        n_groups: int = 1,
        max_context: int = 128,
        *,
        windows: Sequence[int] = (),
        prefix: bool = True,
        hash_bits: int = 64,
        **config: Any,
    ) -> None:
        super().__init__()
        self.config = SchedulerConfig(**config)
        self.index = PrefixIndex(n_blocks, block_size, hash_bits) if prefix else None
        self.pool = BlockPool(n_blocks, block_size, self.index)
        self.windows = windows or (0,) * n_groups
        n_entries = -(-max_context // block_size)
        self.tables = BlockTables(len(self.windows), self.config.max_num_seqs, n_entries, self.windows)
        self.now = 100.0
        self.scheduler = Scheduler(self.pool, self.tables, self.config, max_context=max_context, clock=lambda: self.now)
        self.kv = np.full((n_blocks, block_size), -1, np.int64)
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.logits_from: dict[int, int] = {}
        self.salts: dict[int, bytes] = {}
        self.computed: dict[int, set[int]] = {}
        self.to_fork: set[int] = set()
        self.searches = Searches(self)
        self.cached: dict[int, int] = {}
        self.log: list[list[Row]] = []
        self.is_committed = True  # the last plan, if there was one

    @staticmethod
    def next_token(context: NDArray[Any]) -> int:
        return zlib.crc32(np.ascontiguousarray(context, np.int64).tobytes()) % 997

    def reference(self, seq: int) -> list[int]:
        prompt, max_new = self.prompts[seq]
        tokens = list(self.given.get(seq, prompt))
        while len(tokens) < len(prompt) + max_new:
            tokens.append(self.next_token(np.array(tokens)))
        return tokens

    def add(
        self,
        n_prompt: int,
        max_new: int,
        *,
        logits_from: int = -1,
        salt: bytes = b"",
        like: int = 0,
        shared: int = 0,
        choices: int = 1,
        sampled: bool = False,
        beams: bool = False,
        priority: int = 0,
        client: str = "",
    ) -> int:
        """A sequence whose prompt begins with `shared` tokens of the stream `like`, and goes on as no other does.

        sampled: as soon as its prompt is computed it is forked into all its choices, as the engine does. beams: they
        are those of a beam search.
        """
        start = 1000 + 100 * len(self.prompts)
        prompt = np.arange(start, start + n_prompt, dtype=np.int32)
        prompt[:shared] = self.stream(like, min(shared, n_prompt))
        extras = [(b"salt", salt)] if salt else []
        seq = self.scheduler.add(
            prompt,
            max_new,
            choices=choices,
            logits_from=logits_from,
            extras=extras,
            priority=priority,
            client=client,
        )
        self.begin_family(seq, choices)
        if sampled:
            self.to_fork.add(seq)
        self.prompts[seq] = (prompt.tolist(), max_new)
        self.logits_from[seq] = logits_from
        self.salts[seq] = salt
        self.scored[seq] = []
        self.computed[seq] = set()
        if beams and choices > 1 and max_new > 0:
            self.searches.begin(seq, choices)
        return seq

    @staticmethod
    def stream(like: int, n: int) -> NDArray[np.int32]:
        """The first n tokens of a prompt that several sequences share."""
        return np.arange(500_000 + 10_000 * like, 500_000 + 10_000 * like + n, dtype=np.int32)

    @staticmethod
    def digests(salt: bytes, tokens: NDArray[Any]) -> list[int]:
        """What the executor stores for each token."""
        digest, stored = zlib.crc32(salt), []
        for token in tokens.tolist():
            digest = zlib.crc32(b"%d" % token, digest)
            stored.append(digest)
        return stored

    def first_seen(self, group: int, position: int) -> int:
        """The first key that a query at a position sees."""
        window = self.windows[group]
        return max(0, position - window + 1) if window else 0

    def context(self, group: int, slot: int, begin: int, end: int) -> NDArray[np.int64]:
        """What the blocks of a group hold at positions begin .. end - 1."""
        size, position = self.pool.block_size, np.arange(begin, end)
        blocks = self.tables.array[group, slot, position // size]
        assert (blocks >= 0).all(), "a block that a query sees was given back"
        return self.kv[blocks, position % size]

    def held(self, slot: int) -> list[int]:
        """Blocks in the tables of a slot, by group."""
        return [int((table[slot] >= 0).sum()) for table in self.tables.array]

    def most(self, n_tokens: int) -> list[int]:
        """Blocks that a sequence of n_tokens stored tokens holds at most between two steps, by group: counted."""
        size = self.pool.block_size
        return [
            max((p // size - self.first_seen(group, p) // size + 1 for p in range(n_tokens)), default=0)
            for group in range(len(self.windows))
        ]

    def forward(self) -> NDArray[np.int32]:
        """Run the planned view; returns the sampled token of each row."""
        view, size = self.scheduler.view, self.pool.block_size
        ids = self.scheduler.planned()
        assert len(ids) == len(set(ids)) == view.n_rows
        assert view.n_tokens <= view.max_tokens
        assert view.n_logits <= self.scheduler.max_logits
        self.copy_blocks()
        sampled, log = np.full(view.n_rows, -1, np.int32), []
        for i, (seq, (slot, first, n_tok, n_log)) in enumerate(zip(ids, view.rows(), strict=True)):
            tokens, end = self.scheduler.tokens(seq), first + n_tok
            assert first == self.scheduler.num_computed(seq)
            stored = self.digests(self.salts[seq], tokens[:end])
            for position in range(first, end):
                blocks = self.tables.array[:, slot, position // size]
                assert [self.pool.refcount(block) for block in blocks] == [1] * len(blocks), "a shared block is written"
                self.kv[blocks, position % size] = stored[position]
            for group in range(len(self.windows)):
                begin = self.first_seen(group, first)
                held = self.context(group, slot, begin, end)
                assert held.tolist() == stored[begin:], f"sequence {seq} reads another's cache"
            self.computed[seq].update(range(first, min(end, len(self.prompts[seq][0]))))
            if self.logits_from[seq] >= 0:
                n_prompt = len(self.prompts[seq][0])
                if self.scored[seq][-1:] != [n_prompt - 1]:  # else they are wanted for the next token alone
                    self.scored[seq] += [p for p in range(end - n_log, end) if p < n_prompt]
            else:
                assert n_log == (end == len(tokens)), "logits exactly at the last token"
            if end == len(tokens) < sum(self.size(seq)):
                assert n_log > 0
                if seq in self.searches:
                    self.searches.take(seq)
                elif seq not in self.on_hold:
                    sampled[i] = self.next_token(tokens[:end])
            log.append((seq, first, n_tok, n_log, int(sampled[i])))
        self.log.append(log)
        return sampled

    def copy_blocks(self) -> None:
        """What an executor does first."""
        for _, source, target in self.scheduler.view.copies():
            self.kv[target] = self.kv[source]
        self.scheduler.view.copies_made()

    def size(self, seq: int) -> tuple[int, int]:
        prompt, max_new = self.prompts[seq]
        return len(prompt), max_new

    def cost(self) -> float:
        """Seconds of a step: a pass over the weights and a little a token."""
        return 0.010 + 0.001 * self.scheduler.view.n_tokens

    def step(self) -> list[int] | None:
        """One step; returns the sequences in it, in row order, or None when there was nothing to do."""
        if self.plan() is None:
            return None
        sampled, seconds = self.forward(), self.cost()
        self.is_committed = True
        self.now += seconds
        self.commit(sampled, seconds)
        ids = self.reap()
        for seq in [seq for seq in ids if seq in self.to_fork and self.scheduler.is_live(seq)]:
            for token in range(self.sizes[seq] - 1):
                if self.can_fork(seq):
                    self.fork(seq, token)
            if self.scheduler.state(seq) == "decoding":
                self.to_fork.discard(seq)
                self.settle(seq)
        return ids

    def plan(self) -> BatchView | None:
        view = self.scheduler.plan()
        while view is None and self.searches.give_up():
            view = self.scheduler.plan()
        self.may_change = view is None
        return view

    def commit(self, sampled: NDArray[np.int32], seconds: float) -> None:
        self.scheduler.commit(sampled, seconds)
        self.may_change = True
        self.searches.go_on()

    def fail_step(self, *, early: bool = False) -> list[int]:
        """A step that breaks off after it wrote into its blocks, or before; returns the sequences in it."""
        if self.plan() is None:
            return []
        self.is_committed = False
        if early:
            return self.scheduler.planned()
        self.copy_blocks()
        for slot, first, n_tok, _ in self.scheduler.view.rows():
            for position in range(first, first + n_tok):
                block, offset = divmod(position, self.pool.block_size)
                self.kv[self.tables.array[:, slot, block], offset] = -7
        return self.scheduler.planned()

    def reap(self) -> list[int]:
        """Finish what reached its length, as the engine does after each step."""
        ids = self.scheduler.planned()
        for seq in ids:
            if self.scheduler.is_live(seq) and self.is_done(seq):
                self.end(seq)
        return ids

    def cancel(self, seq: int) -> None:
        """End a sequence before its time, and with it the search that it is a beam of."""
        if seq in self.searches:
            self.searches.end(seq)
        else:
            self.scheduler.finish(seq)

    def end(self, seq: int) -> None:
        self.outputs[seq] = self.scheduler.tokens(seq).tolist()
        self.cached[seq] = self.scheduler.cached_tokens(seq)
        self.scheduler.finish(seq)

    def is_done(self, seq: int) -> bool:
        n_prompt, max_new = self.size(seq)
        if max_new == 0:
            return self.scheduler.num_computed(seq) == n_prompt
        return len(self.scheduler.tokens(seq)) == n_prompt + max_new

    def run(self, max_steps: int = 2000) -> int:
        """Step until nothing is left, checking conservation after each (promise 3); returns the steps it took."""
        for n in range(max_steps):
            self.release()
            if self.step() is None and not self.live():
                assert not self.scheduler.has_work
                return n
            self.scheduler.check_integrity()
        raise AssertionError(f"still busy after {max_steps} steps")

    def most_steps(self) -> int:
        """Steps until all that is live has ended, if nobody is on hold: the oldest advances by a token in each.

        A beam may be computed again from its beginning before it does.
        """
        steps = 0
        for seq in self.live():
            if seq in self.searches:
                steps += self.searches.most_steps(seq) if seq == self.relatives(seq)[0] else 0
            else:
                steps += sum(self.size(seq)) * (self.sizes[seq] if seq in self.to_fork else 1)
        return steps

    def check_outputs(self) -> None:
        self.searches.check()
        for seq, output in self.outputs.items():
            assert output == self.reference(seq), f"sequence {seq} went wrong"
            n_prompt = len(self.prompts[seq][0])
            skipped = n_prompt - len(self.computed[seq])
            assert 0 <= self.cached[seq] <= skipped, "what was computed is not counted as cached"
            assert self.scheduler.preemptions or self.queued or self.cached[seq] == skipped

    def check_index(self) -> None:
        """Every entry of the index names the tokens that its block holds (the executor's digests say so)."""
        for block in range(self.pool.n_blocks):
            chain, at = [], block
            if self.index is not None and (entry := self.index.entry(at)) is not None and entry[0] > 0:
                at = entry[1]  # the first group's block of the same tokens
                assert self.index.entry(at)[2] == entry[2]
            while self.index is not None and (entry := self.index.entry(at)) is not None:
                chain.append(entry[2])
                at = entry[1]
            if chain:
                tokens = np.array([token for part in reversed(chain) for token in part])
                stored = [self.digests(salt, tokens)[-self.pool.block_size :] for salt in {*self.salts.values()}]
                assert self.kv[block].tolist() in stored, f"block {block} does not hold what its entry says"


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World
