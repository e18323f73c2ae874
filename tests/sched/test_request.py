"""The type-state: what must not compile does not, and a spent handle raises."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from Cython.Compiler.Main import CompilationOptions, compile_single
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import miro_cy
from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.errors import InternalError
from miro_cy.sched.request import SequenceTable, StaleHandle, legal_edges

if TYPE_CHECKING:
    from miro_cy.sched.request import Handle

ROOT = Path(miro_cy.__file__).parent.parent
STATES = ("Queued", "Prefilling", "Decoding", "Finished")

#: Each function that takes a handle, the one state it takes, and a call of it.
CALLS = {
    "admit": ("Queued", "t.admit(h, 0.0)"),
    "start_decoding": ("Prefilling", "t.start_decoding(h, 1, 0.0)"),
    "preempt_prefilling": ("Prefilling", "t.preempt_prefilling(h)"),
    "preempt_decoding": ("Decoding", "t.preempt_decoding(h)"),
    "finish_queued": ("Queued", "t.finish_queued(h)"),
    "finish_prefilling": ("Prefilling", "t.finish_prefilling(h)"),
    "finish_decoding": ("Decoding", "t.finish_decoding(h)"),
    "forget": ("Finished", "t.forget(h)"),
    "queued": ("Queued", "t.queued(h)"),
    "prefilling": ("Prefilling", "t.prefilling(h)"),
    "decoding": ("Decoding", "t.decoding(h)"),
    "holds_prefilling": ("Prefilling", "t.holds_prefilling(h)"),
    "holds_decoding": ("Decoding", "t.holds_decoding(h)"),
    "blocks_to_admit": ("Queued", "t.blocks_to_admit(h)"),
    "blocks_to_grow": ("Decoding", "t.blocks_to_grow(h)"),
    "grow": ("Decoding", "t.grow(h)"),
    "push_chunk": ("Prefilling", "t.push_chunk(h, view, 1)"),
    "push_next": ("Decoding", "t.push_next(h, view)"),
    "advance_prefilling": ("Prefilling", "t.advance_prefilling(h, 1)"),
    "advance_decoding": ("Decoding", "t.advance_decoding(h)"),
    "append": ("Decoding", "t.append(h, 1)"),
}
#: The state that each transition returns.
NEXT = {
    "admit": "Prefilling",
    "start_decoding": "Decoding",
    "preempt_prefilling": "Queued",
    "preempt_decoding": "Queued",
    "finish_queued": "Finished",
    "finish_prefilling": "Finished",
    "finish_decoding": "Finished",
}
HEAD = """
from miro_cy.batch cimport BatchView
from miro_cy.sched.request cimport Decoding, Finished, Prefilling, Queued, SequenceTable

"""


def function(name: str, state: str, body: str) -> str:
    return f"cdef {name}(SequenceTable t, {state} h, BatchView view):\n    {body}\n\n"


def refused_lines(folder: Path, functions: list[str]) -> set[int]:
    """Translate a module of these functions to C; the indices of those that Cython refuses."""
    starts, source = [], HEAD
    for text in functions:
        starts.append(source.count("\n") + 1)
        source += text
    path = folder / "snippet.pyx"
    path.write_text(source)
    options = CompilationOptions(include_path=[str(ROOT)], language_level=3, output_file=str(folder / "snippet.c"))
    errors = io.StringIO()
    with redirect_stderr(errors):
        result = compile_single(str(path), options, "snippet")
    lines = set()
    for line in errors.getvalue().splitlines():
        if line.startswith(str(path) + ":"):
            lines.add(int(line[len(str(path)) + 1 :].split(":")[0]))
    assert bool(lines) == bool(result.num_errors)
    return {i for i, start in enumerate(starts) if start + 1 in lines}


def test_promise_type_state_every_forbidden_call_is_refused_by_cython(tmp_path: Path) -> None:
    cases = [
        (name, state) for name, (right, _) in CALLS.items() for state in STATES if state != right
    ]  # fmt: skip
    refused = refused_lines(tmp_path, [function(f"f{i}", s, CALLS[n][1]) for i, (n, s) in enumerate(cases)])
    assert [case for i, case in enumerate(cases) if i not in refused] == []


def test_a_transition_returns_the_next_state_and_no_other(tmp_path: Path) -> None:
    cases = [(name, state) for name, right in NEXT.items() for state in STATES if state != right]
    bodies = [f"cdef {state} next = {CALLS[name][1]}" for name, state in cases]
    functions = [
        function(f"f{i}", CALLS[n][0], body) for i, ((n, _), body) in enumerate(zip(cases, bodies, strict=True))
    ]
    refused = refused_lines(tmp_path, functions)
    assert [case for i, case in enumerate(cases) if i not in refused] == []


def test_every_legal_call_compiles(tmp_path: Path) -> None:
    functions = [
        function(f"f{i}", state, f"cdef {NEXT[name]} next = {call}" if name in NEXT else call)
        for i, (name, (state, call)) in enumerate(CALLS.items())
    ]
    assert refused_lines(tmp_path, functions) == set()


def test_every_function_that_takes_a_handle_is_covered() -> None:
    text = (ROOT / "miro_cy/sched/request.pxd").read_text()
    table = text[text.index("cdef class SequenceTable") :]
    taking = {
        line.split("(self, ")[0].split()[-1]
        for line in table.splitlines()
        if any(f"(self, {s} h" in line for s in STATES)
    }
    assert taking == set(CALLS)


def test_the_edges_are_those_of_the_design() -> None:
    assert legal_edges() == {
        ("nothing", "queued"),
        ("queued", "prefilling"),
        ("prefilling", "decoding"),
        ("prefilling", "queued"),
        ("decoding", "queued"),
        ("queued", "finished"),
        ("prefilling", "finished"),
        ("decoding", "finished"),
        ("finished", "nothing"),
    }


def small_table(n_entries: int = 3, n_slots: int = 2) -> SequenceTable:
    return SequenceTable(BlockPool(8, 4), BlockTables(1, n_slots, 4), n_entries, n_slots)


def new(table: SequenceTable, sequence_id: int = 1, n: int = 5) -> Handle:
    return table.create(sequence_id, np.arange(n, dtype=np.int32), 3, -1, 0.0)


def test_a_spent_handle_raises() -> None:
    table = small_table()
    queued = new(table)
    prefilling = table.admit(queued, 0.0)
    table.advance_prefilling(prefilling, 5)
    decoding = table.start_decoding(prefilling, 7, 0.0)
    again = table.preempt_decoding(decoding)
    finished = table.finish_queued(again)
    table.forget(finished)
    for call in (
        lambda: table.admit(queued, 0.0),
        lambda: table.preempt_prefilling(prefilling),
        lambda: table.grow(decoding),
        lambda: table.append(decoding, 1),
        lambda: table.finish_queued(again),
        lambda: table.forget(finished),
        lambda: table.admit({"slot": 99, "generation": 0}, 0.0),
        lambda: table.admit({"slot": -1, "generation": 0}, 0.0),
    ):
        with pytest.raises(StaleHandle):
            call()
    table.check()
    assert table.pool.n_free == 8
    # The entry serves another sequence; the old handles stay dead.
    assert new(table)["slot"] == queued["slot"]
    with pytest.raises(StaleHandle):
        table.admit(queued, 0.0)


def test_a_transition_that_cannot_be_made_leaves_everything_as_it_was() -> None:
    table = small_table(n_slots=1)
    first, second = new(table, 1), new(table, 2)
    prefilling = table.admit(first, 0.0)
    with pytest.raises(InternalError, match="slots are taken"):
        table.admit(second, 0.0)
    with pytest.raises(InternalError, match="cannot take token"):
        table.start_decoding(prefilling, 7, 0.0)
    with pytest.raises(InternalError, match="cannot advance by 6"):
        table.advance_prefilling(prefilling, 6)
    table.check()
    table.finish_prefilling(prefilling)
    table.admit(second, 0.0)
    table.check()


def test_admission_needs_the_whole_of_its_blocks() -> None:
    table = SequenceTable(BlockPool(3, 4), BlockTables(1, 2, 4), 2, 2)
    first, second = new(table, 1), new(table, 2)
    assert table.blocks_to_admit(first) == 2
    table.admit(first, 0.0)
    with pytest.raises(InternalError, match="needs 2 more KV blocks, 1 are available"):
        table.admit(second, 0.0)
    table.check()
    assert table.pool.n_free == 1


def test_rows_are_pushed_from_what_is_not_computed() -> None:
    table = small_table()
    view = BatchView(4, 16, table.tables.array)
    prefilling = table.admit(new(table), 0.0)
    assert table.push_chunk(prefilling, view, 3) == 0
    table.advance_prefilling(prefilling, 3)
    assert table.push_chunk(prefilling, view, 2) == 1
    with pytest.raises(InternalError, match="no 3 tokens to compute"):
        table.push_chunk(prefilling, view, 3)
    table.advance_prefilling(prefilling, 2)
    decoding = table.start_decoding(prefilling, 9, 0.0)
    table.grow(decoding)
    assert table.push_next(decoding, view) == 1
    assert view.rows() == [(0, 0, 3, 0), (0, 3, 2, 1), (0, 5, 1, 1)]


def test_a_row_is_not_decoded_without_room() -> None:
    table = small_table()
    decoding = None
    prefilling = table.admit(new(table, n=7), 0.0)  # 7 tokens and the next fill two blocks
    table.advance_prefilling(prefilling, 7)
    decoding = table.start_decoding(prefilling, 9, 0.0)
    table.advance_decoding(decoding)
    table.append(decoding, 9)
    assert table.blocks_to_grow(decoding) == 1
    with pytest.raises(InternalError, match="no room"):
        table.push_next(decoding, BatchView(1, 1, table.tables.array))
    assert table.grow(decoding) == 1
    table.push_next(decoding, BatchView(1, 1, table.tables.array))


def test_the_table_checks_its_sizes() -> None:
    for entries, slots in ((0, 1), (1, 0), (1, 3)):
        with pytest.raises(ValueError, match="no sequence table"):
            SequenceTable(BlockPool(8, 4), BlockTables(1, 2, 4), entries, slots)
    table = small_table(n_entries=1)
    new(table)
    with pytest.raises(InternalError, match="entries are taken"):
        new(table)


class HandleMachine(RuleBasedStateMachine):
    """Any function on any handle ever returned: only the current one of the right state works."""

    @initialize()
    def start(self) -> None:
        self.table = small_table()
        self.handles: list[tuple[Handle, str, int]] = []  # handle, its state, its sequence
        self.current: dict[int, Handle] = {}
        self.next_id = 0

    @rule(n=st.integers(1, 9))
    def create(self, n: int) -> None:
        if len(self.current) == self.table.n_entries:
            with pytest.raises(InternalError):
                new(self.table, self.next_id, n)
            return
        self.keep(new(self.table, self.next_id, n), "Queued", self.next_id)
        self.next_id += 1

    def keep(self, handle: Handle, state: str, sequence: int) -> None:
        self.handles.append((handle, state, sequence))
        self.current[sequence] = handle

    @rule(name=st.sampled_from([*NEXT, "forget"]), data=st.data())
    def transition(self, name: str, data: st.DataObject) -> None:
        if not self.handles:
            return
        handle, state, sequence = data.draw(st.sampled_from(self.handles))
        extra = {"admit": (0.0,), "start_decoding": (1, 0.0)}.get(name, ())
        good = state == CALLS[name][0] and self.current.get(sequence) == handle
        try:
            result = getattr(self.table, name)(handle, *extra)
        except StaleHandle:
            assert not good
        except InternalError:
            assert good, "no pool, slot or logits"
        else:
            assert good, f"{name} took a spent or foreign handle"
            del self.current[sequence]
            if name != "forget":
                self.keep(result, NEXT[name], sequence)

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        if self.handles:
            handle, state, sequence = data.draw(st.sampled_from(self.handles))
            if state == "Prefilling" and self.current.get(sequence) == handle:
                while True:
                    try:
                        self.table.advance_prefilling(handle, 1)
                    except InternalError:
                        break

    @invariant()
    def whole(self) -> None:
        self.table.check()


TestHandleMachine = HandleMachine.TestCase
TestHandleMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
