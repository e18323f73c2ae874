"""prompt_logprobs: what the model thought of each token of the prompt, in the bits of `logits(log_softmax=True)`."""

import numpy as np
import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.errors import ContextOverflow, NonFinite
from miro_cy.requests import Request

BASE = {"threads": 1, "block_size": 16, "step_ms": 60_000}
LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 129, 150]


def prompts_of(vocab, lengths=LENGTHS):
    rng = np.random.default_rng(21)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def expected_scores(engine, tokens, top):
    """From the rows of `logits`: each token's value, and the largest values, ties to the lowest id."""
    rows = engine.logits(tokens, log_softmax=True)
    scores = [None]
    for row, token in zip(rows[:-1], tokens[1:], strict=True):
        order = np.argsort(-row, kind="stable")[:top]
        scores.append((float(row[token]), [(int(i), float(row[i])) for i in order]))
    return scores


def params_of(top=3, **more):
    return SamplingParams(**{"max_tokens": 5, "temperature": 0, "ignore_eos": True, "prompt_logprobs": top, **more})


@pytest.fixture(scope="module")
def alone(golden):
    """(prompts, the scores of each, computed alone without a prefix cache)."""
    with Engine.load(golden("llama"), **BASE, prefix_cache=False) as engine:
        prompts = prompts_of(engine.vocab_size)
        return prompts, [expected_scores(engine, prompt, 3) for prompt in prompts]


def small_pool(engine, blocks):
    return engine._parts.spec.kv_bytes_per_token("fp32") * engine.config.block_size * blocks


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("top", [0, 1, 7, 128])
def test_the_bits_are_those_of_logits(llama, top, max_tokens):
    for tokens in prompts_of(llama.vocab_size, [1, 2, 40, 70]):
        result = llama.generate({"tokens": tokens}, params_of(top, max_tokens=max_tokens))
        assert result.prompt_logprobs == expected_scores(llama, tokens, top)
        assert len(result.prompt_logprobs) == len(tokens)
        assert (len(result.tokens), result.finish_reason) == (max_tokens, "length")


def test_a_vocabulary_that_fills_no_whole_panel(load, text_model):
    engine = load(text_model, threads=1)
    assert engine.vocab_size % 16
    tokens = prompts_of(engine.vocab_size, [70])[0]
    result = engine.generate({"tokens": tokens}, params_of(128, max_tokens=1))
    assert result.prompt_logprobs == expected_scores(engine, tokens, 128)


def test_the_bits_are_those_of_generated_tokens(llama):
    """A prompt that holds an answer scores it as it was scored when it was generated."""
    prompt = [5, 9, 2]
    answer = llama.generate({"tokens": prompt}, params_of(max_tokens=30, logprobs=3))
    again = llama.generate({"tokens": prompt + answer.tokens}, params_of(max_tokens=0))
    assert again.prompt_logprobs == answer.prompt_logprobs + answer.logprobs


def test_the_answer_is_that_of_an_unscored_prompt(llama):
    for tokens in prompts_of(llama.vocab_size, [1, 17, 90]):
        plain = llama.generate({"tokens": tokens}, SamplingParams(max_tokens=12, seed=4, logprobs=2))
        scored = llama.generate(
            {"tokens": tokens}, SamplingParams(max_tokens=12, seed=4, logprobs=2, prompt_logprobs=0)
        )
        assert plain.prompt_logprobs is None
        assert (scored.tokens, scored.logprobs) == (plain.tokens, plain.logprobs)


def test_scoring_alone_computes(llama, steer):
    steered = steer(llama)
    result = llama.generate({"tokens": [1, 2, 3]}, params_of(max_tokens=0))
    assert [view[0][1:] for view in steered.views] == [(0, 3, 3)]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.text) == (3, 0, "")
    assert result.timing.prefill_ms > 0


def test_a_prompt_as_long_as_the_context(llama):
    tokens = prompts_of(llama.vocab_size, [llama.context])[0]
    result = llama.generate({"tokens": tokens}, params_of(0, max_tokens=0))
    assert len(result.prompt_logprobs) == llama.context
    with pytest.raises(ContextOverflow):
        llama.generate({"tokens": tokens}, params_of(0, max_tokens=1))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_step_tokens": 7}, {"threads": 2, "block_size": 32}, {"max_step_tokens": 1}, {"prefix_cache": False}],
    ids=str,
)
def test_promise_batch_invariance_of_prompt_scores(load, golden, alone, settings):
    prompts, expected = alone
    engine = load(golden("llama"), **{**BASE, "kv_memory": "32MiB", **settings})
    wants = [params_of(max_tokens=i % 4) if i % 3 else SamplingParams(max_tokens=4) for i in range(len(prompts))]
    results = engine.generate([{"tokens": prompt} for prompt in prompts], wants)
    for got, want, params in zip(results, expected, wants, strict=True):
        assert got.prompt_logprobs == (None if params.prompt_logprobs is None else want)


def test_promise_batch_invariance_of_prompt_scores_under_preemption(load, golden, alone):
    prompts, expected = alone
    probe = load(golden("llama"), **BASE)
    for step_tokens, blocks in ((512, 12), (13, 14)):
        engine = load(golden("llama"), **BASE, kv_memory=small_pool(probe, blocks), max_step_tokens=step_tokens)
        # Twice: the second time, others find the blocks of the first.
        for _ in range(2):
            got = engine.generate([{"tokens": p} for p in prompts], params_of(max_tokens=40))
            assert [one.prompt_logprobs for one in got] == expected
        assert engine.stats()["preemptions"] > 0
        engine.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_promise_batch_invariance_of_prompt_scores_preempted_half_way(load, golden, alone, steer, prefix_cache):
    """A few rows at a time beside a sequence that grows: the rows that it had are not asked for again."""
    prompts, expected = alone
    probe = load(golden("llama"), **BASE)
    settings = {**BASE, "kv_memory": small_pool(probe, 11), "max_step_tokens": 5, "prefix_cache": prefix_cache}
    engine = load(golden("llama"), **settings)
    views = steer(engine).views
    engine.add(Request({"tokens": prompts[3]}, params_of(None, max_tokens=100)))
    scored = engine.add(Request({"tokens": prompts[-2]}, params_of(max_tokens=3)))
    given = [e.prompt_logprobs for e in drain(engine) if e.request_id == scored and e.prompt_logprobs is not None]
    assert given == [expected[-2]]
    assert engine.stats()["preemptions"] > 0
    chunks = [row for view in views for row in view if row[2] > 1]
    asked = [first + n_tok - n_log + i for _, first, n_tok, n_log in chunks for i in range(n_log)]
    assert max(asked) < len(prompts[-2])
    if not prefix_cache:
        assert any(n_log == 0 for *_, n_log in chunks[3:])
        assert sum(n_tok for _, _, n_tok, _ in chunks) > 15 + 129


def drain(engine):
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def test_others_may_find_its_blocks_and_it_takes_none_of_theirs(load, golden, alone):
    prompts, expected = alone
    engine = load(golden("llama"), **BASE, kv_memory="8MiB")
    for _ in range(2):
        scored = engine.generate({"tokens": prompts[-1]}, params_of())
        assert scored.prompt_logprobs == expected[-1]
        assert scored.usage.cached_tokens == 0
    assert engine.generate({"tokens": prompts[-1]}, SamplingParams(max_tokens=1)).usage.cached_tokens == 144


def test_stream_gives_them_once_with_the_first_token(llama):
    tokens = prompts_of(llama.vocab_size, [90])[0]
    events = list(llama.stream({"tokens": tokens}, params_of()))
    assert [event.prompt_logprobs is not None for event in events] == [True, False, False, False, False]
    assert events[0].prompt_logprobs == expected_scores(llama, tokens, 3)
    (event,) = llama.stream({"tokens": tokens}, params_of(max_tokens=0))
    assert (event.finish_reason, event.tokens) == ("length", ())
    assert event.prompt_logprobs == expected_scores(llama, tokens, 3)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_the_first_of_several_choices_has_them(llama, max_tokens):
    tokens = prompts_of(llama.vocab_size, [90])[0]
    plain = SamplingParams(n=5, max_tokens=max_tokens, seed=8, logprobs=1, ignore_eos=True)
    scored = SamplingParams(n=5, max_tokens=max_tokens, seed=8, logprobs=1, ignore_eos=True, prompt_logprobs=3)
    without, result = llama.generate([{"tokens": tokens}] * 2, [plain, scored])
    expected = expected_scores(llama, tokens, 3)
    assert [choice.prompt_logprobs for choice in result.choices] == [expected, None, None, None, None]
    assert result.prompt_logprobs == expected
    assert [(c.tokens, c.logprobs) for c in result.choices] == [(c.tokens, c.logprobs) for c in without.choices]
    given = [e.choice for e in llama.stream({"tokens": tokens}, scored) if e.prompt_logprobs is not None]
    assert given == [0]


def test_a_beam_search_tells_them_with_its_best_hypothesis(llama):
    tokens = prompts_of(llama.vocab_size, [90])[0]
    expected = expected_scores(llama, tokens, 3)
    for max_tokens in (0, 5):
        plain = SamplingParams(beam_width=3, max_tokens=max_tokens, ignore_eos=True)
        scored = SamplingParams(beam_width=3, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=3)
        without, result = llama.generate([{"tokens": tokens}] * 2, [plain, scored])
        assert [choice.prompt_logprobs for choice in result.choices] == [expected, None, None]
        assert [(c.tokens, c.score) for c in result.choices] == [(c.tokens, c.score) for c in without.choices]


@pytest.mark.parametrize("more", [{"n": 4, "temperature": 1.0, "seed": 5}, {"beam_width": 4}], ids=str)
def test_promise_batch_invariance_of_prompt_scores_of_several_choices(load, golden, alone, more):
    """In a pool where sequences and their forks are preempted, beside others, with their blocks found again or not."""
    prompts, expected = alone
    probe = load(golden("llama"), **BASE)
    params = params_of(max_tokens=24, **more)
    for prefix_cache in (True, False):
        settings = {"kv_memory": small_pool(probe, 13), "max_step_tokens": 40, "prefix_cache": prefix_cache}
        engine = load(golden("llama"), **BASE, **settings)
        for got, want in zip(engine.generate([{"tokens": p} for p in prompts], params), expected, strict=True):
            assert got.prompt_logprobs == want
        assert engine.stats()["preemptions"] > 0
        engine.check_integrity()


def test_who_ends_before_they_are_complete_has_none(load, golden):
    engine = load(golden("llama"), **BASE, max_step_tokens=2)
    prompt = {"tokens": prompts_of(engine.vocab_size, [20])[0]}
    request = engine.add(Request(prompt, params_of()))
    assert [engine.step(), engine.step()] == [[], []]
    assert engine.abort(request)
    (event,) = engine.step()
    assert (event.finish_reason, event.prompt_logprobs) == ("cancelled", None)
    late = engine.add(Request(prompt, params_of(), deadline_ms=0.001))
    (event,) = drain(engine)
    assert (event.request_id, event.finish_reason, event.prompt_logprobs) == (late, "deadline", None)
    engine.check_integrity()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 7, 19, 20])
def test_a_row_that_is_no_number_ends_its_request_alone(llama, steer, value, position):
    """The row after the last token is no score: it counts when it gives a token."""
    tokens = prompts_of(llama.vocab_size, [21])[0]
    steered = steer(llama)

    def poison(view, logits):
        logits = logits.copy()
        at = 0
        for _, first, n_tok, n_log in view.rows():
            if n_log > 1 and 0 <= position - (first + n_tok - n_log) < n_log:
                logits[at + position - (first + n_tok - n_log), 3] = value
            at += n_log
        return logits

    steered.after = poison
    ids = [
        llama.add(Request({"tokens": tokens}, params_of())),
        llama.add(Request({"tokens": tokens[:5]}, SamplingParams(max_tokens=3, temperature=0))),
        llama.add(Request({"tokens": tokens}, params_of(max_tokens=0))),
    ]
    last = {e.request_id: e for e in drain(llama) if e.finish_reason is not None}
    assert [last[i].finish_reason for i in ids] == ["error", "length", "error" if position < 20 else "length"]
    assert isinstance(last[ids[0]].error, NonFinite)
    assert f"position {position + 1}" in str(last[ids[0]].error)
    assert (last[ids[0]].prompt_logprobs is None) == (position < 20)


def test_impossible_tokens_have_no_probability(llama, steer):
    """-inf is a value like any other, as long as some token of the row is possible."""

    def forbid(view, logits):
        logits = logits.copy()
        logits[:, 7] = -np.inf
        return logits

    steer(llama).after = forbid
    result = llama.generate({"tokens": [7, 7, 1]}, params_of(max_tokens=0))
    assert result.prompt_logprobs[1].logprob == -np.inf
    assert np.isfinite(result.prompt_logprobs[2].logprob)
