"""Deadlines in every state, on a clock set by hand; and what a request may say of priority, client and deadlines."""

from types import SimpleNamespace

import pytest

from miro_cy import SamplingParams
from miro_cy.deadlines import Deadlines
from miro_cy.errors import BadField
from miro_cy.requests import Request


@pytest.fixture
def timed(load, golden, monkeypatch, steer):
    """An engine whose steps take 10 ms of a clock of their own, with room for one sequence at a time."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("miro_cy.loading.time", SimpleNamespace(monotonic=lambda: clock.now))
    engine = load(golden("llama"), threads=1, max_num_seqs=1, max_step_tokens=16, max_waiting=8)

    def tick(view):
        clock.now += 0.010

    steer(engine).before = tick
    return engine


def ask(n_prompt=4, max_tokens=20, **more):
    return Request(
        {"tokens": [1 + i % 300 for i in range(n_prompt)]},
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        **more,
    )


def run(engine):
    """The last event of each request, and the steps it took to come."""
    ends, steps = {}, 0
    while engine.has_work:
        steps += 1
        for event in engine.step():
            if event.finish_reason is not None:
                assert event.request_id not in ends
                ends[event.request_id] = (event, steps)
        engine.check_integrity()
    return ends


def test_a_deadline_ends_a_request_in_whatever_state_it_is(timed):
    """The first decodes, the second computes its prompt when its time is up, the third waits."""
    decoding = timed.add(ask(max_tokens=200, deadline_ms=95))
    prompt = timed.add(ask(n_prompt=400, deadline_ms=145))
    waiting = timed.add(ask(deadline_ms=115))
    last = timed.add(ask(max_tokens=2))
    ends = run(timed)
    assert [ends[i][0].finish_reason for i in (decoding, prompt, waiting, last)] == ["deadline"] * 3 + ["length"]
    assert [ends[i][1] for i in (decoding, waiting, prompt)] == [11, 13, 16], "within one step"
    assert ends[decoding][0].usage.completion_tokens == 10
    assert ends[prompt][0].usage.completion_tokens == ends[waiting][0].usage.completion_tokens == 0
    assert all(ends[i][0].error is None for i in ends)


def test_the_time_to_begin_counts_until_the_prompt_is_begun(timed):
    first = timed.add(ask(max_tokens=12, queue_ms=5))
    late = timed.add(ask(queue_ms=50))
    patient = timed.add(ask(max_tokens=2, queue_ms=500, deadline_ms=60_000))
    ends = run(timed)
    assert {i: ends[i][0].finish_reason for i in ends} == {first: "length", late: "deadline", patient: "length"}


def test_a_cancel_wins_over_a_deadline_that_comes_with_it(timed):
    request = timed.add(ask(deadline_ms=5))
    timed.step()
    assert timed.abort(request)
    assert run(timed)[request][0].finish_reason == "cancelled"


def test_deadlines_of_finished_requests_are_forgotten(timed):
    for _ in range(5):
        timed.add(ask(max_tokens=1, queue_ms=1e6, deadline_ms=1e6))
    timed.add(ask(max_tokens=0, deadline_ms=1e6))
    run(timed)
    deadlines = timed._parts.core._deadlines
    assert not deadlines._begin_by
    assert not deadlines._end_by


def test_each_deadline_is_due_once():
    deadlines = Deadlines()
    deadlines.add(1, 10.0, 1000, 3000)
    deadlines.add(2, 10.0, None, 2000)
    deadlines.add(3, 10.0, 5000, None)
    deadlines.add(4, 10.0, None, None)
    assert deadlines.due(10.9) == []
    assert deadlines.due(11.0) == [(1, True)]
    assert deadlines.due(12.5) == [(2, False)]
    deadlines.forget(3)
    assert deadlines.due(20.0) == [(1, False)]
    assert deadlines.due(1e9) == []
    deadlines.add(5, 0.0, 1000, 1000)
    assert deadlines.due(1.0) == [(5, False)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("priority", value) for value in (101, -101, 1.0, "1", None, True, 10**400)],
        *[("client", value) for value in (None, 5, b"a", "x" * 257)],
        *[(name, value) for name in ("queue_ms", "deadline_ms") for value in (0, -1, float("nan"), 2**54, "5", True)],
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(BadField, match=field) as caught:
        Request({"tokens": [1]}, SamplingParams(), **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_the_engine_hands_priority_and_client_to_the_scheduler(load, golden, policy):
    engine = load(golden("llama"), threads=1, max_num_seqs=1, policy=policy)
    plain = [engine.add(ask(max_tokens=2, client="many")) for _ in range(6)]
    engine.step()
    special = engine.add(ask(max_tokens=2, client="one", priority=10))
    order = list(run(engine))
    assert order.index(special) == 1, "the one that was running, then this"
    assert set(order) == {*plain, special}
