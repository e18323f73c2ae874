"""The step level: add, abort, step, stats; and what a failing step does to whom."""

import json

import numpy as np
import pytest

from miro_cy import SamplingParams
from miro_cy.errors import BadField, InternalError, NonFinite, QueueFull
from miro_cy.live import Sampled
from miro_cy.requests import Request

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def by_request(events):
    """The events of each request."""
    found = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    return found


def tokens_of(events):
    return [token for event in events for token in event.tokens]


def test_nothing_to_do(llama):
    assert not llama.has_work
    assert llama.step() == []


def test_steps_give_what_generate_gives(llama, run):
    prompts = [{"tokens": [i, i + 1, 2 * i]} for i in range(1, 6)]
    expected = [result.tokens for result in llama.generate(prompts, GREEDY)]
    ids = [llama.add(Request(prompt, GREEDY)) for prompt in prompts]
    assert len(set(ids)) == 5
    assert llama.stats()["waiting"] == 5
    events = by_request(run(llama))
    assert [tokens_of(events[i]) for i in ids] == expected
    for i in ids:
        assert [event.finish_reason for event in events[i]] == [None] * 7 + ["length"]
        assert events[i][-1].usage.completion_tokens == 8
        assert all(event.choice == 0 for event in events[i])


def test_prepared_requests_keep_their_seed_and_may_be_added_twice(llama, run):
    request = llama.prepare({"tokens": [4, 5, 6]}, SamplingParams(max_tokens=10))
    assert request.params.seed is not None
    assert request.prompt["tokens"].dtype == np.int32
    first, second = llama.add(request), llama.add(request)
    events = by_request(run(llama))
    assert tokens_of(events[first]) == tokens_of(events[second])


def test_a_request_that_only_looks_prepared_is_checked(llama, run):
    good = llama.add(Request({"tokens": [1, 2, 3]}, GREEDY))
    for bad in (
        np.array([1, 320]),
        np.array([1.5]),
        np.zeros((1, 2), np.int32),
        np.array([], np.int32),
        np.array([-1]),
    ):
        with pytest.raises(BadField):
            llama.add(Request({"tokens": bad}, GREEDY))
    events = by_request(run(llama))
    assert list(events) == [good]
    assert len(tokens_of(events[good])) == 8


def test_abort_frees_at_once_and_tells_with_the_next_step(llama, run):
    keep = llama.add(Request({"tokens": [1, 2, 3]}, GREEDY))
    drop = llama.add(Request({"tokens": [4, 5, 6]}, GREEDY))
    llama.step()
    running = llama.stats()["free_blocks"]
    assert llama.abort(drop)
    assert not llama.abort(drop)
    assert llama.stats()["free_blocks"] > running
    events = by_request(run(llama))
    assert [event.finish_reason for event in events[drop]] == ["cancelled"]
    assert events[drop][0].usage.prompt_tokens == 3
    assert events[keep][-1].finish_reason == "length"
    assert not llama.abort(keep)
    assert not llama.abort(10**9)


def test_abort_before_the_first_step(llama):
    request = llama.add(Request({"tokens": [1]}, GREEDY))
    assert llama.abort(request)
    assert llama.has_work
    (event,) = llama.step()
    assert (event.request_id, event.finish_reason, event.tokens) == (request, "cancelled", ())
    assert not llama.has_work


def test_max_tokens_zero_ends_with_the_next_step(llama):
    request = llama.add(Request({"tokens": [1, 2]}, SamplingParams(max_tokens=0)))
    (event,) = llama.step()
    assert (event.request_id, event.finish_reason, event.usage.prompt_tokens) == (request, "length", 2)
    assert event.timing is not None


def test_a_full_queue_says_when_to_come_back(load, golden, run):
    engine = load(golden("llama"), threads=1, max_waiting=2, max_num_seqs=1)
    ids = [engine.add(Request({"tokens": [i]}, GREEDY)) for i in (1, 2)]
    for _ in range(2):
        with pytest.raises(QueueFull) as caught:
            engine.add(Request({"tokens": [3]}, GREEDY))
        assert caught.value.retry_after_ms > 0
    engine.step()
    ids.append(engine.add(Request({"tokens": [3]}, GREEDY)))
    events = by_request(run(engine))
    assert sorted(events) == sorted(ids)
    assert all(events[i][-1].finish_reason == "length" for i in ids)


def test_hand_added_requests_run_beside_generate(llama, run):
    expected = llama.generate({"tokens": [7, 8]}, GREEDY).tokens
    by_hand = llama.add(Request({"tokens": [7, 8]}, GREEDY))
    assert llama.generate({"tokens": [7, 8]}, GREEDY).tokens == expected
    assert tokens_of(by_request(run(llama))[by_hand]) == expected


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_fails_its_own_request_alone(llama, steer, bad, run):
    """One of three requests gets bad rows from its fourth token on; the others never notice."""
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    expected = [llama.generate({"tokens": prompt}, GREEDY).tokens for prompt in prompts]
    steered = steer(llama)
    poisoned = set()

    def poison(view, logits):
        logits = logits.copy()
        at = 0
        for slot, first, n_tok, n_log in view.rows():
            if (first, n_tok) == (0, 4):
                poisoned.add(slot)
            at += n_log
            if slot in poisoned and first == 6:
                logits[at - 1] = bad
        return logits

    steered.after = poison
    ids = [llama.add(Request({"tokens": prompt}, GREEDY)) for prompt in prompts]
    events = by_request(run(llama))
    assert tokens_of(events[ids[0]]) == expected[0]
    assert tokens_of(events[ids[2]]) == expected[2]
    assert tokens_of(events[ids[1]]) == expected[1][:3]
    assert events[ids[1]][-1].finish_reason == "error"
    assert isinstance(events[ids[1]][-1].error, NonFinite)
    assert [event.error for i in (ids[0], ids[2]) for event in events[i]] == [None] * 16


def test_a_failing_executor_ends_all_and_the_engine_goes_on(llama, steer):
    expected = llama.generate({"tokens": [1, 2, 3]}, GREEDY).tokens
    steered = steer(llama)
    ids = [llama.add(Request({"tokens": [1, 2, 3 + i]}, GREEDY)) for i in range(3)]
    llama.step()

    def fail(view):
        raise RuntimeError("the executor broke")

    steered.before = fail
    events = llama.step()
    assert sorted(event.request_id for event in events) == ids
    assert all(isinstance(event.error, InternalError) and "the executor broke" in str(event.error) for event in events)
    assert not llama.has_work
    with pytest.raises(InternalError, match="the executor broke"):
        llama.generate({"tokens": [1, 2, 3]}, GREEDY)
    with pytest.raises(InternalError, match="the executor broke"):
        llama.logits([1, 2, 3])
    steered.before = lambda view: None
    assert llama.generate({"tokens": [1, 2, 3]}, GREEDY).tokens == expected


def test_a_step_that_fails_after_some_rows_were_read_leaks_nothing(llama, monkeypatch, run):
    """The first request ends in the very step in which reading the second row fails."""
    advance, calls = Sampled._advance, []

    def fail_second(self, text, token):
        calls.append(token)
        if len(calls) == 2:
            raise RuntimeError("the text stage broke")
        return advance(self, text, token)

    monkeypatch.setattr(Sampled, "_advance", fail_second)
    ids = [llama.add(Request({"tokens": [1, 2]}, SamplingParams(temperature=0, max_tokens=n))) for n in (1, 5, 5)]
    events = by_request(run(llama))
    assert [events[i][-1].finish_reason for i in ids] == ["length", "error", "error"]
    assert all(len(events[i]) == 1 for i in ids)
    monkeypatch.undo()
    assert llama.stats()["running"] == 0
    assert len(llama.generate({"tokens": [1, 2]}, GREEDY).tokens) == 8


def test_a_failing_step_gives_each_choice_one_event(llama, monkeypatch):
    advance, calls = Sampled._advance, []

    def fail_third(self, text, token):
        calls.append(token)
        if len(calls) == 3:
            raise RuntimeError("the text stage broke")
        return advance(self, text, token)

    monkeypatch.setattr(Sampled, "_advance", fail_third)
    ids = [llama.add(Request({"tokens": [1, 2]}, GREEDY)) for _ in range(3)]
    events = llama.step()
    assert sorted(event.request_id for event in events) == ids
    assert {event.finish_reason for event in events} == {"error"}


def test_stats_are_there_at_any_time(llama):
    keys = {
        "running", "waiting", "free_blocks", "cached_blocks", "total_blocks", "preemptions", "steps",
        "last_step_age_ms", "prompt_tokens", "generated_tokens", "finished", "threads", "context",
    }  # fmt: skip
    assert keys <= set(llama.stats())
    request = llama.add(Request({"tokens": [1]}, GREEDY))
    llama.step()
    stats = llama.stats()
    assert (stats["running"], stats["waiting"]) == (1, 0)
    assert 0 <= stats["last_step_age_ms"] < 60_000
    llama.abort(request)
    llama.step()


def test_warming_up_leaves_no_trace(llama):
    before = llama.stats()
    llama.warm_up()
    after = llama.stats()
    for name in ("steps", "finished", "generated_tokens", "prompt_tokens", "free_blocks", "running", "waiting"):
        assert after[name] == before[name], name
    assert not llama.has_work


def test_warming_up_disturbs_no_live_request(llama, run):
    request = llama.add(Request({"tokens": [1, 2, 3]}, GREEDY))
    llama.warm_up()
    assert len(tokens_of(by_request(run(llama))[request])) == 8


def test_warming_up_runs_the_model_and_tells_what_is_wrong_with_it(llama, steer):
    steered = steer(llama)
    llama.warm_up()
    assert len(steered.views) == 1
    steered.after = lambda _, logits: np.full_like(logits, np.nan)
    with pytest.raises(NonFinite):
        llama.warm_up()
    assert not llama.has_work


def test_what_is_served_is_described_in_text_and_numbers(llama):
    about = llama.describe()
    assert about["context"] == llama.context
    assert about["fingerprint"].startswith(llama.fingerprint[:8])
    assert about["capacity"] == llama.stats()["total_blocks"] * about["block_size"]
    assert about["kv_dtype"] in about["fingerprint"]
    assert json.loads(json.dumps(about)) == about
