"""The type-state as Cython sees it: a call in the wrong state does not compile."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

from Cython.Compiler.Main import CompilationOptions, compile_single

import miro_cy

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
    "grow": ("Decoding", "t.grow(h, view)"),
    "catch_up": ("Prefilling", "t.catch_up(h)"),
    "is_awaiting": ("Prefilling", "t.is_awaiting(h)"),
    "push_chunk": ("Prefilling", "t.push_chunk(h, view, 1)"),
    "push_next": ("Decoding", "t.push_next(h, view)"),
    "advance_prefilling": ("Prefilling", "t.advance_prefilling(h, 1)"),
    "advance_decoding": ("Decoding", "t.advance_decoding(h)"),
    "append": ("Decoding", "t.append(h, 1)"),
    "blocks_to_fork": ("Decoding", "blocks_to_fork(t, h)"),
    "fork_decoding": ("Decoding", "fork_decoding(t, h, 9, 1, view)"),
    "fork_queued": ("Decoding", "fork_queued(t, h, 9, 1)"),
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
    "fork_decoding": "Decoding",
    "fork_queued": "Queued",
}
HEAD = """
from miro_cy.batch cimport BatchView
from miro_cy.sched.forks cimport blocks_to_fork, fork_decoding, fork_queued
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
    lines = text[text.index("cdef class SequenceTable") :].splitlines()
    lines += (ROOT / "miro_cy/sched/forks.pxd").read_text().splitlines()
    taking = {
        line.split("(")[0].split()[-1]
        for line in lines
        if any(f"({first}, {s} h" in line for s in STATES for first in ("self", "SequenceTable table"))
    }
    assert taking == set(CALLS)
