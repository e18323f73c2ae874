"""Parallel sampling: n choices of one prompt, which is computed once; each with an end and a usage of its own."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from miro_cy import SamplingParams
from miro_cy.errors import BadField, ContextOverflow, NonFinite, QueueFull, Unschedulable
from miro_cy.live import Sampled
from miro_cy.requests import Request

PROMPT = {"tokens": list(range(1, 40))}
DRAWN = {"seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}


def small(load, golden, blocks, **settings):
    """An engine whose pool has that many blocks of 16 tokens."""
    path = golden("llama")
    block = load(path)._parts.spec.kv_bytes_per_token("fp32") * 16
    return load(path, threads=1, block_size=16, kv_memory=blocks * block, **settings)


def test_choices_differ_and_the_first_is_what_one_alone_gives(llama):
    alone = llama.generate(PROMPT, SamplingParams(**DRAWN))
    four = llama.generate(PROMPT, SamplingParams(n=4, **DRAWN))
    assert (four.tokens, four.logprobs, four.text) == (alone.tokens, alone.logprobs, alone.text)
    assert len({tuple(choice.tokens) for choice in four.choices}) == len(four.choices) == 4
    assert [len(choice.logprobs) for choice in four.choices] == [12] * 4
    assert (four.choices[0].tokens, four.choices[0].usage) == (four.tokens, four.usage)
    assert all(choice.choices == [] and choice.score is None for choice in four.choices)
    assert [choice.tokens for choice in alone.choices] == [alone.tokens]


def test_fewer_choices_are_the_first_of_more(llama):
    eight = llama.generate(PROMPT, SamplingParams(n=8, **DRAWN))
    three = llama.generate(PROMPT, SamplingParams(n=3, **DRAWN))
    assert [choice.tokens for choice in three.choices] == [choice.tokens for choice in eight.choices[:3]]


def test_greedy_choices_are_all_alike(llama):
    three = llama.generate(PROMPT, SamplingParams(n=3, temperature=0, max_tokens=9, ignore_eos=True))
    assert [choice.tokens for choice in three.choices] == [three.tokens] * 3


def test_the_prompt_is_computed_once(load, golden, steer):
    engine = load(golden("llama"), threads=1, prefix_cache=False)
    steered = steer(engine)
    engine.generate(PROMPT, SamplingParams(n=8, **DRAWN))
    computed = Counter()
    for view in steered.views:
        for _, first, n_tok, _ in view:
            computed.update(position for position in range(first, first + n_tok) if position < 39)
    assert computed == Counter(range(39))
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["finished"]) == (39, 8 * 12, 1)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_hold_the_blocks_of_the_prompt_once(load, golden, prefix_cache, run):
    engine = load(golden("llama"), threads=1, block_size=16, prefix_cache=prefix_cache)
    engine.add(Request({"tokens": list(range(1, 165))}, SamplingParams(n=8, **DRAWN)))
    pool = engine._parts.core._pool
    held = []
    while len(held) < 4:
        if engine.step() or held:
            held.append(pool.n_blocks - pool.available())
    assert held == [11, 18, 18, 18], "164 tokens: ten full blocks for all, and a partial one, copied when it is written"
    run(engine)


def test_events_name_their_choice_and_each_ends_once(llama, ends):
    events = list(llama.stream(PROMPT, SamplingParams(n=3, **DRAWN)))
    tokens = defaultdict(list)
    for event in events:
        tokens[event.choice] += event.tokens
    assert {choice: len(found) for choice, found in tokens.items()} == {0: 12, 1: 12, 2: 12}
    last = ends(events)
    assert [event.finish_reason for event in last.values()] == ["length"] * 3
    for event in last.values():
        assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (39, 12)
        assert event.timing is not None
    assert events[-1].finish_reason is not None


def test_cached_tokens_are_those_of_the_request(load, golden):
    engine = load(golden("llama"), threads=1, block_size=16)
    for cached in (0, 32):
        result = engine.generate(PROMPT, SamplingParams(n=3, **DRAWN))
        assert [choice.usage.cached_tokens for choice in result.choices] == [cached] * 3
    assert engine.stats()["cached_tokens"] == 32


def test_no_tokens_wanted(llama):
    result = llama.generate(PROMPT, SamplingParams(n=3, max_tokens=0))
    assert [choice.finish_reason for choice in result.choices] == ["length"] * 3
    assert [choice.usage.prompt_tokens for choice in result.choices] == [39] * 3
    assert len(list(llama.stream(PROMPT, SamplingParams(n=3, max_tokens=0)))) == 3


def test_one_token_each(llama):
    """All choices end with the token that they draw from the lead's row: nothing is forked."""
    result = llama.generate(PROMPT, SamplingParams(n=5, seed=3, max_tokens=1))
    more = llama.generate(PROMPT, SamplingParams(n=5, **DRAWN))
    assert [choice.tokens for choice in result.choices] == [choice.tokens[:1] for choice in more.choices]


def test_choices_end_each_for_itself(speaker, monkeypatch):
    """Whoever ends with its first token, the first choice included, the others go on."""
    speaker.say("hello w")
    engine = speaker.engine
    first = engine.tokenizer.encode("hello")
    ending = {}

    def advance(self, text, token):
        if ending.get(text.index) == text.usage.completion_tokens:
            return text.stream.finish(), "stop", None
        return real(self, text, token)

    real = Sampled._advance
    monkeypatch.setattr(Sampled, "_advance", advance)
    for ending in ({0: 1}, {1: 1}, {0: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 2, 1: 1, 2: 3}):
        result = engine.generate(speaker.prompt, SamplingParams(n=3, temperature=0, max_tokens=4, ignore_eos=True))
        assert [len(choice.tokens) for choice in result.choices] == [ending.get(i, 4) for i in range(3)], ending
        assert result.choices[1].tokens[0] == first[0]
        engine.check_integrity()
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_stop_string_ends_the_choice_that_says_it(load, text_model):
    engine = load(text_model, threads=1)
    params = {"n": 6, "seed": 9, "max_tokens": 40, "ignore_eos": True, "temperature": 2.0}
    free = engine.generate("hello", SamplingParams(**params))
    stop = free.choices[2].text.strip()[4:6]
    stopped = engine.generate("hello", SamplingParams(stop=stop, **params))
    for choice, before in zip(stopped.choices, free.choices, strict=True):
        if stop in before.text:
            assert (choice.finish_reason, choice.stop) == ("stop", stop)
            assert choice.text == before.text[: before.text.index(stop)]
        else:
            assert (choice.finish_reason, choice.text) == ("length", before.text)
    assert stopped.choices[2].finish_reason == "stop"


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_ends_every_choice_once(llama, steps, run, ends):
    request = llama.add(Request({"tokens": list(range(1, 80))}, SamplingParams(n=4, **DRAWN)))
    told = [event for _ in range(steps) for event in llama.step()]
    assert llama.abort(request)
    assert not llama.abort(request)
    last = ends(told + run(llama))
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "cancelled" for i in range(4)}
    assert all(event.usage.prompt_tokens == 79 for event in last.values())


def test_closing_a_stream_cancels_all_choices(llama, is_whole):
    stream = llama.stream(PROMPT, SamplingParams(n=4, **DRAWN | {"max_tokens": 300}))
    next(stream)
    stream.close()
    assert is_whole(llama)


def test_a_deadline_ends_every_choice(load, golden, ends):
    engine = load(golden("llama"), threads=1)
    now = [1000.0]
    engine._parts.core._clock = lambda: now[0]
    request = engine.add(Request(PROMPT, SamplingParams(n=3, **DRAWN), deadline_ms=5000, queue_ms=5000))
    told = engine.step() + engine.step()
    now[0] += 6
    last = ends(told + engine.step())
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "deadline" for i in range(3)}
    assert not engine.has_work


@pytest.mark.parametrize(("step", "failing"), [(1, {0, 1, 2}), (4, {0})])
def test_logits_that_are_not_finite_end_whom_they_belong_to(llama, steer, step, failing, run, ends):
    steered = steer(llama)

    def spoil(view, logits):
        if len(steered.views) == step:
            logits = logits.copy()
            logits[0] = np.nan
        return logits

    steered.after = spoil
    request = llama.add(Request({"tokens": [1, 2, 3]}, SamplingParams(n=3, **DRAWN)))
    last = ends(run(llama))
    assert {choice for (_, choice), event in last.items() if isinstance(event.error, NonFinite)} == failing
    assert sorted(last) == [(request, i) for i in range(3)]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_failed_step_ends_every_choice(llama, steer, at, run, ends):
    steered = steer(llama)

    def fail(view):
        if len(steered.views) > at:
            raise RuntimeError("the executor broke")

    steered.before = fail
    request = llama.add(Request(PROMPT, SamplingParams(n=3, **DRAWN)))
    last = ends(run(llama))
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "error" for i in range(3)}


def test_a_fork_that_fails_ends_every_choice(llama, monkeypatch, run, ends):
    def fail(seq, token):
        raise MemoryError

    class Failing:
        def __init__(self, scheduler):
            self._scheduler = scheduler

        def __getattr__(self, name):
            return fail if name == "fork" else getattr(self._scheduler, name)

    core = llama._parts.core
    monkeypatch.setattr(core, "_scheduler", Failing(core._scheduler))
    request = llama.add(Request(PROMPT, SamplingParams(n=3, **DRAWN)))
    last = ends(run(llama))
    assert {key: event.finish_reason for key, event in last.items()} == {(request, i): "error" for i in range(3)}


def test_limits(load, golden):
    for bad in (0, 65):
        with pytest.raises(BadField, match="n must be between 1 and 64"):
            SamplingParams(n=bad)
    engine = small(load, golden, 6)
    with pytest.raises((ContextOverflow, Unschedulable)):
        engine.generate(PROMPT, SamplingParams(n=2, max_tokens=90))
    result = engine.generate(PROMPT, SamplingParams(n=64, seed=1, max_tokens=50, ignore_eos=True))
    assert {len(choice.tokens) for choice in result.choices} == {50}
    engine.check_integrity()


def test_a_request_counts_in_the_queue_for_all_its_choices(load, golden, run, ends):
    engine = load(golden("llama"), threads=1, max_waiting=6, max_num_seqs=8)
    params = SamplingParams(n=4, **DRAWN)
    first = engine.add(Request(PROMPT, params))
    with pytest.raises(QueueFull) as caught:
        engine.add(Request(PROMPT, params))
    assert caught.value.retry_after_ms > 0
    second = engine.add(Request(PROMPT, SamplingParams(n=2, **DRAWN)))
    with pytest.raises(QueueFull):
        engine.add(Request(PROMPT, SamplingParams(**DRAWN)))
    last = ends(run(engine))
    assert sorted(last) == [*((first, i) for i in range(4)), *((second, i) for i in range(2))]
    engine.add(Request(PROMPT, SamplingParams(n=64, **DRAWN)))  # more than the queue holds, but it is empty
    assert len(ends(run(engine))) == 64


def test_generate_waits_for_room_in_the_queue(load, golden):
    engine = load(golden("llama"), threads=1, max_waiting=5, max_num_seqs=4)
    results = engine.generate([PROMPT] * 6, [SamplingParams(n=n, **DRAWN) for n in (3, 1, 5, 2, 8, 1)])
    assert [len(result.choices) for result in results] == [3, 1, 5, 2, 8, 1]
    assert len({tuple(result.tokens) for result in results}) == 1


@pytest.mark.parametrize("admission", ["watermark", "reserve"])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 64])
@pytest.mark.parametrize("blocks", [4, 7, 12])
def test_choices_without_room_wait_for_it(load, golden, llama, admission, max_num_seqs, blocks):
    engine = small(load, golden, blocks, admission=admission, max_num_seqs=max_num_seqs)
    wanted = [llama.generate(PROMPT, SamplingParams(n=6, **DRAWN | {"seed": seed})) for seed in range(3)]
    got = engine.generate([PROMPT] * 3, [SamplingParams(n=6, **DRAWN | {"seed": seed}) for seed in range(3)])
    for one, other in zip(got, wanted, strict=True):
        assert [(c.tokens, c.logprobs) for c in one.choices] == [(c.tokens, c.logprobs) for c in other.choices]
    engine.check_integrity()
    assert admission == "watermark" or engine.stats()["preemptions"] == 0
