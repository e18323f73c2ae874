"""Beam search as a request: what it tells and when, how it ends before its time, what it costs."""

from collections import Counter

import numpy as np
import pytest

from miro_cy import SamplingParams
from miro_cy.errors import BadField, ContextOverflow, MiroError, NonFinite, QueueFull
from miro_cy.requests import Request

PROMPT = {"tokens": list(range(1, 40))}
WIDE = {"beam_width": 4, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}


# --- what comes of it ----------------------------------------------------------------------------------------------


def test_choices_are_different_hypotheses_best_first(llama):
    result = llama.generate(PROMPT, SamplingParams(**WIDE))
    scores = [choice.score for choice in result.choices]
    assert len({tuple(choice.tokens) for choice in result.choices}) == len(scores) == 4
    assert scores == sorted(scores, reverse=True)
    for choice in result.choices:
        assert choice.score == sum(item.logprob for item in choice.logprobs) / len(choice.tokens)
    assert (result.tokens, result.score, result.text) == (result.choices[0].tokens, scores[0], result.choices[0].text)


def test_it_finds_what_greedy_misses(llama):
    greedy = llama.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0))
    beams = llama.generate(PROMPT, SamplingParams(**WIDE | {"beam_width": 16}))
    assert beams.score > sum(item.logprob for item in greedy.logprobs) / 12


def test_logprobs_are_those_of_the_scored_text(llama):
    for choice in llama.generate(PROMPT, SamplingParams(**WIDE)).choices:
        scored = llama.logits(PROMPT["tokens"] + choice.tokens[:-1], rows=slice(38, None), log_softmax=True)
        for row, token, item in zip(scored, choice.tokens, choice.logprobs, strict=True):
            assert item.logprob == row[token]
            assert len(item.top) == 2


def test_a_stream_tells_nothing_before_the_end(llama):
    whole = llama.generate(PROMPT, SamplingParams(**WIDE))
    events = list(llama.stream(PROMPT, SamplingParams(**WIDE)))
    assert [event.choice for event in events] == [0, 1, 2, 3]
    for event, choice in zip(events, whole.choices, strict=True):
        assert ([*event.tokens], event.score, event.logprobs) == (choice.tokens, choice.score, choice.logprobs)
        assert event.usage == choice.usage
        assert event.timing is not None


def test_n_best_of_the_beams(llama):
    whole = llama.generate(PROMPT, SamplingParams(**WIDE))
    for n in (2, 3, 4):
        best = llama.generate(PROMPT, SamplingParams(n=n, **WIDE))
        assert [choice.tokens for choice in best.choices] == [choice.tokens for choice in whole.choices[:n]]
        assert len(list(llama.stream(PROMPT, SamplingParams(n=n, **WIDE)))) == n
    with pytest.raises(BadField, match="beam_width 4") as caught:
        SamplingParams(n=5, **WIDE)
    assert caught.value.field == "n"


def test_one_token_and_none(llama):
    row = llama.logits(PROMPT["tokens"], rows=slice(-1, None), log_softmax=True)[0]
    best = np.argsort(-row, kind="stable")[:4]
    result = llama.generate(PROMPT, SamplingParams(**WIDE | {"max_tokens": 1}))
    assert [choice.tokens for choice in result.choices] == [[token] for token in best]
    assert [choice.score for choice in result.choices] == [row[token] for token in best]
    nothing = llama.generate(PROMPT, SamplingParams(**WIDE | {"max_tokens": 0}))
    assert [choice.finish_reason for choice in nothing.choices] == ["length"] * 4
    assert [choice.usage.prompt_tokens for choice in nothing.choices] == [39] * 4


def test_what_is_left_of_the_context_is_its_longest(load, golden):
    engine = load(golden("llama"), threads=1, max_context=60)
    result = engine.generate(PROMPT, SamplingParams(beam_width=3, ignore_eos=True, early_stopping="never"))
    assert [len(choice.tokens) for choice in result.choices] == [21] * 3
    with pytest.raises(ContextOverflow):
        engine.generate(PROMPT, SamplingParams(beam_width=3, max_tokens=22))


def test_text_eos_and_stop_tokens(load, text_model):
    engine = load(text_model, threads=1)
    (eos,) = engine.tokenizer.eos_ids
    free = engine.generate("hello", SamplingParams(beam_width=6, max_tokens=5, ignore_eos=True))
    assert [choice.text for choice in free.choices] == [engine.detokenize(choice.tokens) for choice in free.choices]
    stop = free.choices[0].tokens[1]
    reasons = Counter()
    for params in ({}, {"stop_token_ids": [stop]}, {"stop_token_ids": [stop, eos], "ignore_eos": True}):
        result = engine.generate("hello", SamplingParams(beam_width=16, max_tokens=5, length_penalty=-2.0, **params))
        stops = {eos, *params.get("stop_token_ids", ())}
        for choice in result.choices:
            assert not stops & {*choice.tokens[:-1]}
            last = choice.tokens[-1]
            ended = last in stops
            assert choice.finish_reason == ("stop" if ended else "length")
            assert choice.stop == (last if last in params.get("stop_token_ids", ()) else None)
            assert choice.text == engine.detokenize(choice.tokens[:-1] if ended else choice.tokens)
            reasons[choice.finish_reason, choice.stop] += 1
    assert reasons["stop", stop] > 0
    assert reasons["length", None] > 0


def test_eos_ends_a_hypothesis(speaker):
    eos = speaker.token("<|im_end|>")
    answer = speaker.say("hello<|im_end|>")
    result = speaker.engine.generate(speaker.prompt, SamplingParams(beam_width=2, max_tokens=6))
    assert (result.tokens, result.text, result.finish_reason, result.stop) == (answer, "hello", "stop", None)
    assert eos not in result.choices[1].tokens[:-1]


def test_what_cannot_be_is_refused(load, text_model, llama):
    engine = load(text_model, threads=1)
    with pytest.raises(BadField, match="stop has no meaning"):
        engine.generate("hello", SamplingParams(beam_width=2, stop="a"))
    with pytest.raises(BadField, match="beam_width must be between 1 and 16"):
        llama.generate(PROMPT, SamplingParams(beam_width=17))


# --- what it costs -------------------------------------------------------------------------------------------------


def test_the_prompt_is_computed_once(load, golden, steer):
    engine = load(golden("llama"), threads=1, prefix_cache=False)
    steered = steer(engine)
    engine.generate(PROMPT, SamplingParams(**WIDE))
    computed = Counter()
    for view in steered.views:
        for _, first, n_tok, _ in view:
            computed.update(range(first, first + n_tok))
    assert computed == Counter({**dict.fromkeys(range(39), 1), **dict.fromkeys(range(39, 50), 4)})
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["finished"]) == (39, 4 * 12, 1)
    assert stats["preemptions"] == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_hold_the_blocks_of_the_prompt_once(load, golden, prefix_cache):
    engine = load(golden("llama"), threads=1, block_size=16, prefix_cache=prefix_cache)
    engine.add(Request({"tokens": list(range(1, 165))}, SamplingParams(**WIDE)))
    pool = engine._parts.core._pool
    held = []
    while engine.has_work:
        engine.step()
        held.append(pool.n_blocks - pool.available())
        engine.check_integrity()
    assert max(held) <= 10 + 4 * 2, "164 tokens are ten full blocks for all, and twelve more are one or two for each"
    assert held[-1] == 0


def test_cached_tokens_are_those_of_the_request(load, golden):
    engine = load(golden("llama"), threads=1, block_size=16)
    for cached in (0, 32):
        result = engine.generate(PROMPT, SamplingParams(**WIDE))
        assert [choice.usage.cached_tokens for choice in result.choices] == [cached] * 4


def test_it_counts_in_the_queue_for_all_its_beams(load, golden, run, ends):
    engine = load(golden("llama"), threads=1, max_waiting=6, max_num_seqs=8)
    first = engine.add(Request(PROMPT, SamplingParams(n=2, **WIDE)))
    with pytest.raises(QueueFull):
        engine.add(Request(PROMPT, SamplingParams(n=2, **WIDE)))
    assert sorted(ends(run(engine), only=True)) == [(first, 0), (first, 1)]
    results = engine.generate([PROMPT] * 5, SamplingParams(n=2, **WIDE))
    assert len({tuple(result.tokens) for result in results}) == 1


# --- an end before its time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_ends_every_choice_once_with_the_best_so_far(llama, is_whole, steps, run, ends):
    request = llama.add(Request(PROMPT, SamplingParams(**WIDE)))
    told = [event for _ in range(steps) for event in llama.step()]
    assert told == []
    assert llama.abort(request)
    assert not llama.abort(request)
    last = ends(run(llama), only=True)
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "cancelled" for i in range(4)}
    assert [len(event.tokens) for event in last.values()] == [steps] * 4
    assert [event.usage.completion_tokens for event in last.values()] == [steps] * 4
    assert is_whole(llama)
    if steps:
        shorter = llama.generate(PROMPT, SamplingParams(**WIDE | {"max_tokens": steps}))
        assert [(e.tokens, e.score) for e in last.values()] == [(tuple(c.tokens), c.score) for c in shorter.choices]


def test_closing_a_stream_cancels_it(llama, is_whole):
    stream = llama.stream(PROMPT, SamplingParams(**WIDE | {"max_tokens": 3}))
    next(stream)
    stream.close()
    assert is_whole(llama)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_deadline_ends_every_choice(load, golden, is_whole, steps, ends):
    engine = load(golden("llama"), threads=1)
    now = [1000.0]
    engine._parts.core._clock = lambda: now[0]
    request = engine.add(Request({"tokens": [5, 6, 7]}, SamplingParams(**WIDE), deadline_ms=5000, queue_ms=5000))
    for _ in range(steps):
        assert engine.step() == []
    now[0] += 6
    last = ends(engine.step(), only=True)
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "deadline" for i in range(4)}
    assert [len(event.tokens) for event in last.values()] == [steps] * 4
    assert is_whole(engine)
    assert not engine.has_work


@pytest.mark.parametrize("step", [1, 2, 6])
def test_logits_that_are_not_finite_end_every_choice(llama, steer, is_whole, step, run, ends):
    steered = steer(llama)

    def spoil(view, logits):
        if len(steered.views) == step:
            logits = logits.copy()
            logits[-1, 7] = np.nan
        return logits

    steered.after = spoil
    request = llama.add(Request(PROMPT, SamplingParams(**WIDE)))
    last = ends(run(llama), only=True)
    assert sorted(last) == [(request, i) for i in range(4)]
    assert all(isinstance(event.error, NonFinite) and event.tokens == () for event in last.values())
    assert len(steered.views) == step
    assert is_whole(llama)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_failed_step_ends_every_choice(llama, steer, is_whole, at, run, ends):
    steered = steer(llama)

    def fail(view):
        if len(steered.views) > at:
            raise RuntimeError("the executor broke")

    steered.before = fail
    request = llama.add(Request(PROMPT, SamplingParams(**WIDE)))
    last = ends(run(llama), only=True)
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "error" for i in range(4)}
    assert is_whole(llama)


@pytest.mark.parametrize("operation", ["resume", "fork", "finish", "join"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_move_that_fails_half_way_ends_every_choice(load, golden, is_whole, monkeypatch, operation, count, run, ends):
    """`join` is only needed when the pool is too small for all beams."""
    per_token = load(golden("llama"), threads=1)._parts.spec.kv_bytes_per_token("fp32")
    engine = load(
        golden("llama"), threads=1, block_size=16, kv_memory=per_token * 16 * (6 if operation == "join" else 30)
    )
    core = engine._parts.core
    left = [count]

    class Failing:
        def __init__(self, scheduler):
            self._scheduler = scheduler

        def __getattr__(self, name):
            if name == operation:
                left[0] -= 1
                if left[0] == 0:
                    raise MemoryError
            return getattr(self._scheduler, name)

    scheduler = core._scheduler
    monkeypatch.setattr(core, "_scheduler", Failing(scheduler))
    request = engine.add(Request(PROMPT, SamplingParams(**WIDE)))
    monkeypatch.setattr(core, "_scheduler", scheduler)
    last = ends(run(engine), only=True)
    assert left[0] <= 0
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "error" for i in range(4)}
    assert is_whole(engine)


def test_one_that_fails_leaves_others_alone(llama, steer, run, ends):
    steered = steer(llama)

    def spoil(view, logits):
        logits = logits.copy()
        if len(steered.views) == 3:
            logits[0] = np.inf
        return logits

    steered.after = spoil
    failing = llama.add(Request(PROMPT, SamplingParams(**WIDE)))
    going = llama.add(Request({"tokens": [7, 8, 9]}, SamplingParams(**WIDE)))
    last = ends(run(llama), only=True)
    assert {key for key, event in last.items() if event.finish_reason == "error"} == {(failing, i) for i in range(4)}
    steered.after = lambda view, logits: logits
    again = llama.generate({"tokens": [7, 8, 9]}, SamplingParams(**WIDE))
    assert [last[going, i].score for i in range(4)] == [choice.score for choice in again.choices]


def test_errors_are_raised_by_generate(llama, steer):
    steered = steer(llama)
    steered.after = lambda view, logits: np.full_like(logits, np.nan)
    with pytest.raises(MiroError):
        llama.generate(PROMPT, SamplingParams(**WIDE))
