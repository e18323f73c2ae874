"""Callers on many threads, callers that are interrupted, engines that are closed, dropped or never closed."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.errors import ConfigError, ContextOverflow, EngineClosed, NonFinite
from miro_cy.requests import Request

LONG = SamplingParams(temperature=0, max_tokens=400)


def sampled(i, max_tokens=16):
    how = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 9}, {"temperature": 1.3}][i % 4]
    return SamplingParams(max_tokens=max_tokens, seed=i, logprobs=1, **how)


def test_sixteen_threads_each_get_what_they_get_alone(llama):
    prompts = [{"tokens": list(range(i, 3 * i + 5))} for i in range(16)]
    alone = [llama.generate(prompt, sampled(i)) for i, prompt in enumerate(prompts)]
    start = threading.Barrier(16)

    def call(i):
        start.wait(30)
        if i % 3 == 0:
            events = list(llama.stream(prompts[i], sampled(i)))
            return [t for e in events for t in e.tokens], [lp for e in events for lp in e.logprobs]
        result = llama.generate([prompts[i]] * 2, sampled(i))[i % 2]
        return result.tokens, result.logprobs

    with ThreadPoolExecutor(16) as pool:
        for _ in range(2):
            assert list(pool.map(call, range(16))) == [(result.tokens, result.logprobs) for result in alone]


def test_threads_that_score_beside_threads_that_generate(llama):
    ids = list(range(40, 80))
    rows = llama.logits(ids)
    alone = llama.generate({"tokens": ids}, sampled(1))

    def call(i):
        if i % 2:
            return (llama.logits(ids) == rows).all()
        return llama.generate({"tokens": ids}, sampled(1)).tokens == alone.tokens

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(16)))


def test_more_prompts_than_may_wait(load, golden, llama):
    engine = load(golden("llama"), threads=1, max_waiting=2, max_num_seqs=3)
    prompts = [{"tokens": [1 + i % 50, i % 7, 3]} for i in range(40)]
    params = [sampled(i, 1 + i % 5) for i in range(40)]
    expected = [result.tokens for result in llama.generate(prompts, params)]
    assert [result.tokens for result in engine.generate(prompts, params)] == expected
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: engine.generate(prompts, params), range(4)):
            assert [result.tokens for result in results] == expected


def test_a_queue_full_of_hand_added_requests_does_not_hold_up_generate(load, golden):
    engine = load(golden("llama"), threads=1, max_waiting=1, max_num_seqs=1)
    by_hand = engine.add(Request({"tokens": [1, 2]}, SamplingParams(temperature=0, max_tokens=5)))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, {"tokens": [1, 2]}, SamplingParams(temperature=0, max_tokens=5))
        tokens = call.result(timeout=20).tokens
    events = []
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {by_hand}
    assert [token for event in events for token in event.tokens] == tokens


def test_one_bad_request_costs_its_own_caller_only(llama, steer):
    prompts = [{"tokens": [1, 2, 3]}, {"tokens": [4, 5, 6, 7]}, {"tokens": [8, 9]}]
    alone = [llama.generate(prompt, sampled(0)).tokens for prompt in prompts]

    def poison(view, logits):
        logits = logits.copy()
        at = 0
        for _, first, n_tok, n_log in view.rows():
            at += n_log
            if (first, n_tok) == (0, 4):
                logits[at - 1, 3] = float("nan")
        return logits

    steer(llama).after = poison

    def call(i):
        try:
            return llama.generate(prompts[i], sampled(0)).tokens
        except NonFinite as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            got = list(pool.map(call, range(3)))
            assert (got[0], got[2]) == (alone[0], alone[2])
            assert isinstance(got[1], NonFinite)


def test_a_request_that_fails_cancels_the_rest_of_its_call(llama, steer, is_whole):
    def poison(view, logits):
        at = 0
        logits = logits.copy()
        for _, first, n_tok, n_log in view.rows():
            at += n_log
            if (first, n_tok) == (0, 4):
                logits[at - 1] = float("nan")
        return logits

    steer(llama).after = poison
    before = llama.stats()["generated_tokens"]
    with pytest.raises(NonFinite):
        llama.generate([{"tokens": [1, 2]}, {"tokens": [1, 2, 3, 4]}, {"tokens": [5]}], LONG)
    assert is_whole(llama)
    assert llama.stats()["generated_tokens"] - before < 800


@pytest.fixture
def ctrl_c():
    """Python's own handling of SIGINT, which a shell may have turned off for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_after(steered, steps):
    """Send this process Ctrl-C in the given forward pass; later ones are slow, so that the rest cannot finish first."""
    seen = []

    def before(view):
        seen.append(view)
        if len(seen) == steps:
            os.kill(os.getpid(), signal.SIGINT)
        elif len(seen) > steps:
            time.sleep(0.01)

    steered.before = before


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("prompts", [{"tokens": [1, 2]}, [{"tokens": [1, 2]}, {"tokens": [3]}]], ids=["one", "two"])
def test_ctrl_c_cancels_generate(llama, steer, is_whole, prompts):
    interrupt_after(steer(llama), 5)
    before = llama.stats()["generated_tokens"]
    with pytest.raises(KeyboardInterrupt):
        llama.generate(prompts, LONG)
    assert is_whole(llama)
    assert llama.stats()["generated_tokens"] - before < 700


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_cancels_a_stream(llama, steer, is_whole):
    interrupt_after(steer(llama), 5)
    with pytest.raises(KeyboardInterrupt):
        for _ in llama.stream({"tokens": [1, 2]}, LONG):
            pass
    assert is_whole(llama)


def test_an_aborted_call_returns_what_it_has(llama, steer):
    """Whoever knows a request's id may abort it; its caller is told, not left waiting."""
    steered = steer(llama)
    steered.before = lambda view: time.sleep(0.002)
    stream = llama.stream({"tokens": [1, 2]}, LONG)
    request = next(stream).request_id
    assert llama.abort(request)
    assert list(stream)[-1].finish_reason == "cancelled"


def test_close_while_others_wait(load, golden, steer):
    engine = load(golden("llama"), threads=1, max_num_seqs=2, max_waiting=2)
    steer(engine).before = lambda view: time.sleep(0.01)

    def call(i):
        if i % 2:
            return list(engine.stream({"tokens": [1 + i]}, LONG))
        return engine.generate([{"tokens": [1 + i]}] * 3, LONG)

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call, i) for i in range(8)]
        deadline = time.monotonic() + 20
        while engine.stats()["running"] < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        engine.close()
        for future in calls:
            with pytest.raises(EngineClosed):
                future.result(timeout=20)
    engine._parts.scheduler.check_integrity()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_dropped_engine_takes_its_thread_along(golden):
    before = threading.enumerate()
    engine = Engine.load(golden("llama"), threads=1)
    engine.generate([{"tokens": [1, 2]}] * 3, SamplingParams(max_tokens=3))
    engine.logits([1, 2, 3])
    (thread,) = [t for t in threading.enumerate() if t not in before]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_only_steps_by_hand_has_no_thread(golden):
    before = threading.active_count()
    with Engine.load(golden("llama"), threads=1) as engine:
        engine.add(Request({"tokens": [1]}, SamplingParams(max_tokens=2)))
        while engine.has_work:
            engine.step()
        assert threading.active_count() == before


@pytest.mark.parametrize("state", ["idle", "streaming", "generating"])
def test_a_program_that_closes_nothing_still_ends(golden, state):
    script = textwrap.dedent(
        """
        import sys, threading
        from miro_cy import Engine, SamplingParams
        engine = Engine.load(sys.argv[1], threads=1)
        engine.generate({"tokens": [1]}, SamplingParams(max_tokens=2))
        if sys.argv[2] == "streaming":
            stream = engine.stream({"tokens": [1]}, SamplingParams(max_tokens=500))
            next(stream)
        if sys.argv[2] == "generating":
            many = [{"tokens": [1, 2]}] * 2000
            call = lambda: engine.generate(many, SamplingParams(max_tokens=500))
            threading.Thread(target=call, daemon=True).start()
        print("done")
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(golden("llama")), state],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_an_engine_left_with_its_stream_half_read_is_given_back(load, golden):
    """A ticket must not keep its engine alive: dropped on the step thread, it would close it there."""
    path = golden("llama")
    before = sum(thread.name == "miro-step" for thread in threading.enumerate())
    for _ in range(5):
        for _event in Engine.load(path, threads=1).stream({"tokens": [1]}, LONG):
            break
        gc.collect()
    deadline = time.monotonic() + 20
    while sum(thread.name == "miro-step" for thread in threading.enumerate()) > before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_loading_in_a_fork_of_a_loaded_process_is_refused_at_once(load, golden):
    load(golden("llama"), threads=2).generate({"tokens": [1]}, SamplingParams(max_tokens=1))
    child = os.fork()
    if child == 0:
        try:
            Engine.load(golden("llama"), threads=2)
        except ConfigError as error:
            os._exit(7 if error.field == "threads" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(load, text_model):
    engine = load(text_model)
    began = time.monotonic()
    with pytest.raises(ContextOverflow, match="characters"):
        engine.generate("1" * 8_000_000)
    assert time.monotonic() - began < 5
