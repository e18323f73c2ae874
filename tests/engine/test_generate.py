"""Whole requests: prompt kinds, order, parameters, streams, logits, text helpers."""

import math

import numpy as np
import pytest

from miro_cy import SamplingParams
from miro_cy._kernels import reference

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [{"tokens": list(range(1 + i, 4 + 3 * i))} for i in range(6)]


def test_greedy_follows_the_golden_continuation(llama, golden):
    with np.load(golden("llama").parent / "golden.npz") as data:
        ids, greedy = data["ids"], data["greedy"]
    result = llama.generate({"tokens": ids}, SamplingParams(temperature=0, max_tokens=len(greedy)))
    assert result.tokens == greedy.tolist()


def test_a_list_gives_a_list_in_order(llama):
    alone = [llama.generate(prompt, GREEDY).tokens for prompt in PROMPTS]
    together = llama.generate(PROMPTS, GREEDY)
    assert [result.tokens for result in together] == alone
    assert [r.tokens for r in llama.generate(tuple(reversed(PROMPTS)), GREEDY)] == alone[::-1]
    assert [result.usage.prompt_tokens for result in together] == [len(p["tokens"]) for p in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_a_list_of_one_and_of_none(llama):
    (only,) = llama.generate([PROMPTS[0]], GREEDY)
    assert only.tokens == llama.generate(PROMPTS[0], GREEDY).tokens
    assert llama.generate([], GREEDY) == []


def test_parameters_one_each(llama):
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 0, 3, 2, 4)]
    results = llama.generate(PROMPTS, each)
    assert [len(result.tokens) for result in results] == [1, 5, 0, 3, 2, 4]
    whole = llama.generate(PROMPTS, GREEDY)
    assert all(a.tokens == b.tokens[: len(a.tokens)] for a, b in zip(results, whole, strict=True))


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, lambda ids: np.array(ids, np.uint16)[::1]])
def test_token_ids_of_any_integer_sequence(llama, kind):
    assert (
        llama.generate({"tokens": kind([5, 6, 7])}, GREEDY).tokens
        == llama.generate({"tokens": [5, 6, 7]}, GREEDY).tokens
    )


def test_every_other_element_of_an_array(llama):
    ids = np.arange(20, dtype=np.int64)
    assert (
        llama.generate({"tokens": ids[::2]}, GREEDY).tokens
        == llama.generate({"tokens": ids[::2].tolist()}, GREEDY).tokens
    )


def test_text_and_messages_are_prompts_too(load, text_model):
    engine = load(text_model, threads=1)
    text = engine.generate("hello world", GREEDY)
    assert text.tokens == engine.generate({"tokens": engine.tokenize("hello world")}, GREEDY).tokens
    messages = [{"role": "user", "content": "hello"}]
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    chat = engine.generate({"messages": messages}, GREEDY)
    assert (
        chat.tokens == engine.generate({"tokens": engine.tokenizer.encode(rendered, add_special=False)}, GREEDY).tokens
    )
    assert chat.usage.prompt_tokens == len(engine.tokenizer.encode(rendered, add_special=False))
    assert text.text == engine.detokenize(text.tokens)


def test_usage_and_timing(llama):
    result = llama.generate({"tokens": [1, 2, 3, 4]}, GREEDY)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (4, 12, 0)
    timing = result.timing
    assert all(math.isfinite(ms) and ms >= 0 for ms in (timing.queue_ms, timing.prefill_ms, timing.decode_ms))
    assert timing.prefill_ms + timing.decode_ms > 0


def test_counters_add_up(llama):
    before = llama.stats()
    llama.generate(PROMPTS, GREEDY)
    after = llama.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == 12 * len(PROMPTS)
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(len(p["tokens"]) for p in PROMPTS)
    assert after["finished"] - before["finished"] == len(PROMPTS)
    assert after["steps"] > before["steps"]
    assert after["threads"] == 1
    assert after["context"] == llama.context


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_draws(llama):
    def tokens(**params):
        return llama.generate(PROMPTS[3], SamplingParams(max_tokens=20, **params)).tokens

    assert tokens(seed=7) == tokens(seed=7)
    assert tokens(seed=7) != tokens(seed=8)
    assert tokens(seed=7) != tokens(seed=7 + 2**32)
    assert tokens() != tokens()  # a fresh seed each time; equal by chance once in a googol


def test_the_engines_seed_fixes_seeds_that_requests_leave_open(load, golden):
    def run(seed):
        engine = load(golden("llama"), threads=1, seed=seed)
        return [result.tokens for result in engine.generate(PROMPTS, SamplingParams(max_tokens=10))]

    first = run(3)
    assert first == run(3)
    assert first != run(4)
    same_prompt = load(golden("llama"), threads=1, seed=3).generate([PROMPTS[0]] * 2, SamplingParams(max_tokens=20))
    assert same_prompt[0].tokens != same_prompt[1].tokens


# --- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_gives_one_token_an_event(llama):
    whole = llama.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, logprobs=2))
    events = list(llama.stream(PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, logprobs=2)))
    assert [event.tokens for event in events] == [(token,) for token in whole.tokens]
    assert [lp for event in events for lp in event.logprobs] == whole.logprobs
    assert [event.finish_reason for event in events] == [None] * 8 + ["length"]
    assert events[-1].usage == whole.usage
    assert len({event.request_id for event in events}) == 1


@pytest.mark.parametrize("how", ["close", "delete", "throw"])
def test_leaving_a_stream_cancels_and_frees_its_blocks(llama, is_whole, how):
    stream = llama.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    assert llama.stats()["free_blocks"] < llama.stats()["total_blocks"]
    if how == "close":
        stream.close()
    elif how == "delete":
        del stream
    else:
        with pytest.raises(KeyError):
            stream.throw(KeyError())
    assert is_whole(llama)


def test_a_stream_that_is_never_started_costs_nothing(llama):
    before = llama.stats()["finished"]
    llama.stream(PROMPTS[0], GREEDY).close()
    assert llama.stats()["finished"] == before


def test_streams_interleave(llama):
    whole = [llama.generate(prompt, GREEDY).tokens for prompt in PROMPTS]
    streams = [llama.stream(prompt, GREEDY) for prompt in PROMPTS]
    got = [[] for _ in streams]
    for _ in range(12):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.extend(next(stream).tokens)
    assert got == whole


# --- logits and log-probabilities ----------------------------------------------------------------------------------


def test_logits_rows_are_a_slice_of_all(llama):
    ids = list(range(3, 43))
    whole = llama.logits(ids)
    assert whole.shape == (40, llama.vocab_size)
    assert whole.dtype == np.float32
    for rows in (
        slice(None),
        slice(5, 9),
        slice(-1, None),
        slice(None, None, 3),
        slice(30, 10, -7),
        slice(7, 7),
        slice(-99, 99),
    ):
        got = llama.logits(np.array(ids), rows=rows)
        assert got.shape == whole[rows].shape
        assert np.array_equal(got, whole[rows])


def test_a_shorter_prompt_has_the_same_rows(llama):
    ids = list(range(3, 43))
    assert np.array_equal(llama.logits(ids[:17]), llama.logits(ids, rows=slice(0, 17)))


def test_logits_equal_the_golden_ones(llama, golden):
    with np.load(golden("llama").parent / "golden.npz") as data:
        ids, expected = data["ids"], data["logits"]
    got = llama.logits(ids)
    assert np.abs(got - expected).max() <= 2e-3 * expected.std()
    assert np.array_equal(got.argmax(1), expected.argmax(1))


def test_log_softmax_of_logits(llama):
    ids = [9, 8, 7, 6]
    raw, normal = llama.logits(ids), llama.logits(ids, log_softmax=True)
    for i in range(4):
        np.testing.assert_allclose(normal[i], reference.log_softmax(raw[i]), rtol=1e-6, atol=4e-6)


def test_logits_of_nothing(llama):
    assert llama.logits([]).shape == (0, llama.vocab_size)
    assert llama.logits([1, 2], rows=slice(2, 2)).shape == (0, llama.vocab_size)


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "seed": 3}], ids=str
)
def test_logprobs_are_bit_equal_to_scored_ones(llama, how):
    prompt = list(range(20, 31))
    result = llama.generate({"tokens": prompt}, SamplingParams(max_tokens=15, logprobs=5, **how))
    scored = llama.logits(prompt + result.tokens[:-1], rows=slice(len(prompt) - 1, None), log_softmax=True)
    for row, token, item in zip(scored, result.tokens, result.logprobs, strict=True):
        assert item.logprob == row[token]
        assert item.top == [(i, float(row[i])) for i in reference.top_k(row, 5)]


def test_logprobs_none_zero_and_many(llama):
    assert llama.generate(PROMPTS[0], GREEDY).logprobs is None
    results = llama.generate(
        [PROMPTS[0]] * 2, [SamplingParams(temperature=0, max_tokens=2, logprobs=n) for n in (0, 128)]
    )
    assert [len(item.top) for item in results[0].logprobs] == [0, 0]
    for token, item in zip(results[1].tokens, results[1].logprobs, strict=True):
        assert len(item.top) == 128
        assert item.top[0] == (token, item.logprob)
        assert [value for _, value in item.top] == sorted((value for _, value in item.top), reverse=True)


# --- what an engine says of itself ---------------------------------------------------------------------------------


def test_tokenize_and_detokenize(load, text_model):
    engine = load(text_model, threads=1)
    text = "hello world <|im_end|> 日本 🙂\n"
    assert engine.detokenize(engine.tokenize(text)) == text.replace("<|im_end|>", "")
    assert engine.tokenize("hello") == engine.tokenizer.encode("hello")


def test_name_context_and_fingerprint(load, golden):
    engine = load(golden("llama"), threads=1, max_context=100)
    assert (engine.name, engine.context, engine.vocab_size) == ("model-f32", 100, 320)
    same = load(golden("llama"), threads=2, block_size=16)
    assert engine.fingerprint == same.fingerprint
    assert engine.fingerprint != load(golden("llama-tied-bias"), threads=1).fingerprint
    assert "exact" in engine.fingerprint
