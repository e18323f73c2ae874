"""Promises 5 and 7: nothing stalls anyone else, and idle is idle."""

import os
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from miro_cy import SamplingParams
from miro_cy.requests import Request


@pytest.fixture
def simulated(load, golden, monkeypatch):
    """An engine on a clock of its own: a step takes 4 ms, and half a millisecond for each token in it."""
    clock = SimpleNamespace(now=1000.0, steps=[])
    monkeypatch.setattr("miro_cy.loading.time", SimpleNamespace(monotonic=lambda: clock.now))
    engine = load(golden("llama"), threads=1, step_ms=50, kv_memory="64MiB", max_num_seqs=200)

    def cost(view):
        seconds = 0.004 + 0.0005 * view.n_tokens
        clock.now += seconds
        clock.steps.append(seconds)

    return engine, clock, cost


def test_promise_nothing_stalls_simulated(simulated, steer):
    """While prompts as long as the context are computed, a stream gets a token every step, and a step stays short."""
    engine, clock, cost = simulated
    steer(engine).before = cost
    stream = engine.add(Request({"tokens": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=300)))
    for _ in range(20):
        engine.step()
    clock.steps.clear()
    long = [engine.add(Request({"tokens": [4 + i] * 500}, SamplingParams(max_tokens=1))) for i in range(3)]
    ended, tokens = set(), 0
    while not ended.issuperset(long):
        events = engine.step()
        tokens += sum(event.request_id == stream for event in events)
        ended |= {event.request_id for event in events if event.finish_reason}
    assert tokens == len(clock.steps)
    assert len(clock.steps) >= 1500 * 0.0005 / 0.05
    assert max(clock.steps) < 0.075  # a prompt of 500 tokens in one step would take 0.254


def test_promise_nothing_stalls_prompts_progress_under_any_load(simulated, steer):
    """A hundred streams alone take longer than a step should: a prompt still gets its share of every step."""
    engine, clock, cost = simulated
    steer(engine).before = cost
    for i in range(100):
        engine.add(Request({"tokens": [i]}, SamplingParams(temperature=0, max_tokens=200)))
    for _ in range(40):
        engine.step()
    assert engine.stats()["running"] == 100
    clock.steps.clear()
    late = engine.add(Request({"tokens": [5] * 160}, SamplingParams(max_tokens=1)))
    steps = 1
    while not any(event.request_id == late for event in engine.step()):
        steps += 1
        assert steps <= 160 / 16 + 1
    assert min(clock.steps) > 0.050


def test_promise_nothing_stalls(load, smollm2_path):
    """A long prompt arrives while a stream runs: the stream's longest pause is a fraction of its time."""
    engine = load(smollm2_path, threads=2, kv_memory="256MiB", step_ms=20)
    engine.generate({"tokens": [1] * 64}, SamplingParams(temperature=0, max_tokens=4))  # the budget has measured
    times, stop = [], threading.Event()

    def follow():
        for _ in engine.stream({"tokens": [5, 6, 7]}, SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)):
            times.append(time.monotonic())
            if stop.is_set():
                return

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        deadline = time.monotonic() + 60
        while len(times) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        engine.generate({"tokens": list(range(100, 1900))}, SamplingParams(temperature=0, max_tokens=1))
        took = time.monotonic() - began
    finally:
        stop.set()
        reader.join(60)
    during = [t for t in times if began <= t <= began + took]
    assert len(during) > 3
    pauses = [b - a for a, b in zip([began, *during], [*during, began + took], strict=True)]
    assert max(pauses) < took / 2


def test_promise_idle(load, golden):
    """Two seconds without requests take next to no processor time, though a step thread is there."""
    engine = load(golden("llama"), threads=2)
    engine.generate([{"tokens": [1, 2, 3]}] * 4, SamplingParams(max_tokens=5))
    stream = engine.stream({"tokens": [1, 2, 3]}, SamplingParams(max_tokens=300))
    next(stream)
    stream.close()
    assert any(thread.name == "miro-step" for thread in threading.enumerate())
    time.sleep(0.3)  # compute threads may wait actively for a moment
    steps, began = engine.stats()["steps"], time.process_time()
    wakeups = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(2)
    assert time.process_time() - began < 0.4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - wakeups < 100  # polling wakes up more often
    assert engine.stats()["steps"] == steps


def test_promise_idle_threads_follow_affinity(golden):
    """Unless told otherwise an engine takes no more threads than the processors it may use."""
    script = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from miro_cy import Engine\n"
        "with Engine.load(sys.argv[1]) as engine: print(engine.stats()['threads'])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(golden("llama"))], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "1\n"


def test_default_threads_fit_the_machine(load, golden):
    assert 1 <= load(golden("llama")).stats()["threads"] <= len(os.sched_getaffinity(0))
