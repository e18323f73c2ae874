"""Closing an engine, twice and under load, and using one in a process forked from the one that made it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy import Engine, Request, SamplingParams
from miro_cy.errors import EngineClosed

PROMPT = {"tokens": [1, 2, 3]}
OTHERS: list[threading.Thread] = []
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture
def engine(golden_file: Callable[[str], Path]) -> Engine:
    return Engine.load(golden_file("gguf/Q4_0.gguf"), threads=2)


def step_threads() -> list[threading.Thread]:
    """Step threads that this module's engines started; those of other modules' fixtures do not count."""
    return [thread for thread in threading.enumerate() if thread.name == "miro-step" and thread not in OTHERS]


@pytest.fixture(autouse=True)
def _others() -> None:
    OTHERS.clear()
    OTHERS.extend(thread for thread in threading.enumerate() if thread.name == "miro-step")


def test_closing_twice(engine: Engine) -> None:
    assert len(engine.generate(PROMPT, SHORT).tokens) == 3
    engine.close()
    engine.close()
    with engine:
        pass
    assert not step_threads()


def test_closing_before_any_use(engine: Engine) -> None:
    with engine:
        pass
    engine.close()


def test_a_closed_engine_refuses_work_and_still_says_what_it_is(engine: Engine) -> None:
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(PROMPT, SHORT),
        lambda: engine.generate([], SHORT),
        lambda: engine.stream(PROMPT, SHORT),
        lambda: engine.logits([1]),
        lambda: engine.add(Request(PROMPT, SHORT)),
        lambda: engine.abort(1),
        engine.step,
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            call()
    assert engine.vocab_size == 320
    assert engine.name == "Q4_0"
    assert engine.fingerprint


def test_a_dropped_engine_ends_its_thread(engine: Engine) -> None:
    # Not the fixture's: pytest keeps that one alive.
    dropped = Engine(engine._parts)
    dropped.generate(PROMPT, SHORT)
    assert len(step_threads()) == 1
    del dropped
    gc.collect()
    assert not step_threads()


class Gate:
    """An executor that waits at a gate before each step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.entered, self.open = threading.Event(), threading.Event()

    def forward(self, view: Any) -> Any:
        self.entered.set()
        assert self.open.wait(30)
        return self._inner.forward(view)


def test_closing_while_requests_run(engine: Engine) -> None:
    gate = Gate(engine._parts.executor)
    engine._parts.core._executor = gate
    caught: list[BaseException] = []

    def work() -> None:
        try:
            engine.generate([PROMPT] * 3, SamplingParams(max_tokens=400, ignore_eos=True))
        except BaseException as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert gate.entered.wait(30)
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine._driver._closed:
        closer.join(0.001)
    gate.open.set()
    worker.join(30)
    closer.join(30)
    assert [type(error) for error in caught] == [EngineClosed]
    assert not step_threads()
    engine.check_integrity()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]


FORK = """
import os, sys
from miro_cy import Engine, Request, SamplingParams
from miro_cy.errors import EngineClosed

prompt, params = {"tokens": [1, 2, 3]}, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
engine = Engine.load(sys.argv[1], threads=2)
before = engine.generate(prompt, params).tokens       # the step thread and the OpenMP team exist now
child = os.fork()
if child == 0:
    refused = 0
    calls = [
        lambda: engine.generate(prompt, params), lambda: engine.stream(prompt, params), lambda: engine.logits([1]),
        lambda: engine.add(Request(prompt, params)), engine.step,
    ]
    for call in calls:
        try:
            call()
        except EngineClosed as error:
            refused += "fork" in str(error)
    engine.close()
    engine.close()
    os._exit(0 if refused == len(calls) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
after = engine.generate(prompt, params).tokens        # the parent's goes on
engine.close()
print(status, before == after)
"""


def test_a_forked_process_is_refused(golden_file: Callable[[str], Path]) -> None:
    command = [sys.executable, "-c", FORK, str(golden_file("gguf/Q4_0.gguf"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0 True\n", done.stderr
