"""Promise 1 with a prefix cache: a hit gives the bits of a miss, whoever computed the blocks."""

from functools import cache

import numpy as np
import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.requests import Request

GOLDEN = ["llama", "llama-odd", "llama3-rope"]
BASE = {"threads": 1, "block_size": 16, "step_ms": 60_000}
WAYS = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.0}]
SETTINGS = [
    {},
    {"max_step_tokens": 7},
    {"threads": 2, "block_size": 32},
    {"block_size": 64, "max_step_tokens": 50, "max_num_seqs": 3},
]


def workload(vocab, count=18, seed=3):
    """Prompts of two families that begin alike for some tokens and then part, in an order that mixes them."""
    rng = np.random.default_rng(seed)
    families = [rng.integers(0, vocab, 120).astype(np.int32) for _ in range(2)]
    prompts, params = [], []
    for i in range(count):
        shared = int(rng.choice([0, 7, 15, 16, 17, 32, 47, 48, 80, 120]))
        tail = rng.integers(0, vocab, int(rng.integers(1, 30))).astype(np.int32)
        prompts.append({"tokens": np.concatenate([families[i % 2][:shared], tail])})
        params.append(
            SamplingParams(max_tokens=8 + i * 7 % 40, seed=50 + i, logprobs=2, ignore_eos=True, **WAYS[i % len(WAYS)])
        )
    return prompts, params


def bits(result):
    values = [value for item in result.logprobs for value in (item.logprob, *(v for _, v in item.top))]
    ids = [i for item in result.logprobs for i, _ in item.top]
    return result.tokens, ids, np.array(values, np.float64).tobytes()


def assert_same(got, expected):
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert bits(one) == bits(other), f"request {i} differs"


def blocks_of(engine, blocks):
    """kv_memory for a pool of that many blocks."""
    return engine._parts.spec.kv_bytes_per_token(engine._parts.kv_dtype) * engine.config.block_size * blocks


@pytest.fixture(scope="module")
def model(golden):
    """The path of a golden model, or of a quantised one by its type."""

    def find(name):
        return golden("llama").parents[2] / "gguf" / f"{name}.gguf" if name.isupper() else golden(name)

    return find


@pytest.fixture(scope="module")
def alone(model):
    """(prompts, parameters, what each gives alone without a prefix cache); computed once."""

    @cache
    def compute(name, mode=None):
        with Engine.load(model(name), **BASE, compute=mode, prefix_cache=False) as engine:
            prompts, params = workload(engine.vocab_size)
            results = [engine.generate(*pair) for pair in zip(prompts, params, strict=True)]
            assert {result.usage.cached_tokens for result in results} == {0}
            assert engine.stats()["cached_blocks"] == 0
            return prompts, params, results

    return compute


def check_hits(load, path, settings, requests):
    prompts, params, expected = requests
    engine = load(path, **{**BASE, "kv_memory": "32MiB", **settings})
    for turn in range(3):
        assert_same(engine.generate(prompts, params), expected)
        engine.check_integrity()
        assert engine.stats()["cached_tokens"] > 300 * turn
    assert_same([engine.generate(*pair) for pair in zip(prompts, params, strict=True)], expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", GOLDEN)
def test_promise_batch_invariance_with_prefix_hits(load, model, alone, name, settings):
    check_hits(load, model(name), settings, alone(name))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_promise_batch_invariance_with_prefix_hits_of_quantised_weights(load, model, alone, quantised_mode, settings):
    check_hits(load, model("Q4_1"), {**settings, "compute": quantised_mode}, alone("Q4_1", quantised_mode))


def check_a_small_pool(load, path, settings, blocks, requests):
    prompts, params, expected = requests
    probe = load(path, **BASE, **settings)
    engine = load(path, **BASE, **settings, kv_memory=blocks_of(probe, blocks))
    for _ in range(2):
        assert_same(engine.generate(prompts, params), expected)
        engine.check_integrity()
    stats = engine.stats()
    assert stats["evictions"] > 0
    assert stats["cached_tokens"] > 0
    assert stats["preemptions"] > 0 or blocks > 13


@pytest.mark.parametrize("blocks", [10, 13, 18])
@pytest.mark.parametrize("name", GOLDEN)
def test_promise_batch_invariance_with_prefix_hits_under_preemption_and_eviction(load, model, alone, name, blocks):
    check_a_small_pool(load, model(name), {}, blocks, alone(name))


@pytest.mark.parametrize("blocks", [10, 13])
def test_promise_batch_invariance_with_prefix_hits_of_quantised_weights_in_a_small_pool(
    load, model, alone, quantised_mode, blocks
):
    check_a_small_pool(load, model("Q4_1"), {"compute": quantised_mode}, blocks, alone("Q4_1", quantised_mode))


@pytest.mark.parametrize("block_size", [16, 32])
def test_promise_batch_invariance_with_prefix_hits_at_every_block_boundary(load, golden, block_size):
    """For each boundary, one token less and one more: cold, warm, and what a longer prompt takes of it."""
    ids = np.random.default_rng(8).integers(0, 300, 200).astype(np.int32)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    lengths = [boundary + d for boundary in range(block_size, 129, block_size) for d in (-1, 0, 1)]
    reference = load(golden("llama"), **{**BASE, "block_size": block_size}, prefix_cache=False)
    expected = {n: reference.generate({"tokens": ids[:n]}, params) for n in lengths}
    for order in (lengths, lengths[::-1], sorted(lengths, key=lambda n: n * 7 % 13)):
        engine = load(golden("llama"), **{**BASE, "block_size": block_size}, kv_memory="8MiB")
        longest = 0
        for n in [*order, *order]:
            result = engine.generate({"tokens": ids[:n]}, params)
            assert bits(result) == bits(expected[n]), f"{n} tokens, at most {longest} seen before"
            assert result.usage.cached_tokens == min((n - 1) // block_size, longest // block_size) * block_size
            longest = max(longest, n)
        engine.close()


def test_promise_batch_invariance_with_prefix_hits_in_a_storm_of_cancels(load, model, alone):
    """Whoever is cancelled in whatever state: the others' bits are their own, and what was left behind is right."""
    prompts, params, expected = alone("llama")
    rng = np.random.default_rng(4)
    probe = load(model("llama"), **BASE)
    engine = load(model("llama"), **BASE, kv_memory=blocks_of(probe, 24), max_step_tokens=48)
    for _ in range(6):
        ids = {engine.add(Request(*pair)): i for i, pair in enumerate(zip(prompts, params, strict=True))}
        tokens = {request: [] for request in ids}
        cancelled = set()
        while engine.has_work:
            if rng.random() < 0.3:
                request = int(rng.choice(list(ids)))
                if engine.abort(request):
                    cancelled.add(request)
            for event in engine.step():
                tokens[event.request_id] += event.tokens
            engine.check_integrity()
        for request, i in ids.items():
            if request not in cancelled:
                assert tokens[request] == expected[i].tokens
        assert cancelled
    assert_same(engine.generate(prompts, params), expected)


def test_promise_batch_invariance_scored_after_hits(load, golden):
    """Scores of a prompt that is in the cache: the positions asked for are computed afresh, and are the same bits."""
    ids = np.random.default_rng(2).integers(0, 300, 150).astype(np.int32)
    with Engine.load(golden("llama"), **BASE, prefix_cache=False) as engine:
        expected = engine.logits(ids)
    engine = load(golden("llama"), **BASE)
    engine.generate({"tokens": ids}, SamplingParams(max_tokens=1))
    for first in (0, 1, 15, 16, 17, 100, 149):
        assert engine.logits(ids, rows=slice(first, None)).tobytes() == expected[first:].tobytes()
    assert engine.stats()["cached_tokens"] == 0 + 0 + 0 + 16 + 16 + 96 + 144


def test_salts_separate_and_change_nothing(load, golden):
    engine = load(golden("llama"), **BASE)
    prompt = {"tokens": list(range(100, 150))}

    def ask(salt):
        return engine.generate(prompt, SamplingParams(temperature=0, max_tokens=5, logprobs=1, cache_salt=salt))

    results = [ask(salt) for salt in (None, "a", "b", "a", None)]
    assert [result.usage.cached_tokens for result in results] == [0, 0, 0, 48, 48]
    assert_same(results, [results[0]] * 5)


def test_every_request_is_told_what_was_cached(load, golden):
    """Usage of requests that end in every way: at once, cancelled, with an error, after a preemption."""
    engine = load(golden("llama"), **BASE, kv_memory="8MiB")
    prompt = {"tokens": list(range(1, 81))}
    assert engine.generate(prompt, SamplingParams(max_tokens=2)).usage.cached_tokens == 0
    assert engine.generate(prompt, SamplingParams(max_tokens=2)).usage.cached_tokens == 64
    assert engine.generate(prompt, SamplingParams(max_tokens=0)).usage.cached_tokens == 0
    queued = engine.add(Request(prompt, SamplingParams(max_tokens=4)))
    engine.abort(queued)
    (event,) = engine.step()
    assert (event.finish_reason, event.usage.cached_tokens) == ("cancelled", 0)
    running = engine.add(Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.step()
    engine.abort(running)
    (event,) = engine.step()
    assert event.usage.cached_tokens == 64
    assert engine.stats()["cached_tokens"] == 128


def test_a_step_whose_logits_are_not_finite_leaves_nothing_behind(load, golden, steer):
    engine = load(golden("llama"), **BASE)
    steered = steer(engine)
    steered.after = lambda _, logits: np.full_like(logits, np.nan)
    request = engine.add(Request({"tokens": list(range(1, 31))}, SamplingParams(max_tokens=4)))
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason) == (request, "error")
    stats = engine.stats()
    assert (stats["cached_blocks"], stats["free_blocks"]) == (0, stats["total_blocks"])


def test_a_step_that_fails_leaves_nothing_behind(load, golden, steer):
    engine = load(golden("llama"), **BASE)
    expected = engine.generate({"tokens": list(range(1, 41))}, SamplingParams(temperature=0, max_tokens=8))
    engine = load(golden("llama"), **BASE)
    steered = steer(engine)

    def fail(view, logits):
        raise RuntimeError("the executor broke after it wrote")

    steered.after = fail
    engine.add(Request({"tokens": list(range(1, 41))}, SamplingParams(max_tokens=4)))
    (event,) = engine.step()
    assert event.finish_reason == "error"
    assert engine.stats()["cached_blocks"] == 0
    steered.after = lambda _, logits: logits
    again = engine.generate({"tokens": list(range(1, 41))}, SamplingParams(temperature=0, max_tokens=8))
    assert (again.tokens, again.usage.cached_tokens) == (expected.tokens, 0)


def test_promise_batch_invariance_with_prefix_hits_of_a_real_model(load, smollm2_path, quantised_mode):
    """SmolLM2, activations rounded: cold, warm, and in a pool that evicts and preempts."""
    base = {**BASE, "threads": 2, "compute": quantised_mode}
    reference = load(smollm2_path, **base, prefix_cache=False)
    story = reference.tokenize(
        "Once upon a time, in a village by the sea, an old man mended nets and told stories. " * 3
    )
    tails = [" He", " The sea was", " Nobody", " One day a", " In winter the boats", " His"]
    prompts = [{"tokens": [*story[: 20 + 7 * i], *reference.tokenize(tail)]} for i, tail in enumerate(tails)]
    params = [
        SamplingParams(max_tokens=24 + 8 * i, seed=i, logprobs=2, ignore_eos=True, **WAYS[i % 3])
        for i in range(len(prompts))
    ]
    expected = reference.generate(prompts, params)
    roomy, tight = {"kv_memory": "128MiB"}, {"kv_memory": blocks_of(reference, 9), "max_step_tokens": 24}
    for settings in (roomy, tight):
        engine = load(smollm2_path, **{**base, **settings})
        for _ in range(2):
            assert_same(engine.generate(prompts, params), expected)
            engine.check_integrity()
        assert engine.stats()["cached_tokens"] > 0
        if settings is tight:
            assert engine.stats()["preemptions"] > 0 < engine.stats()["evictions"]
        engine.close()
