"""Promise 1 for parallel sampling: each choice has the bits it has when its request is alone, in any schedule."""

from functools import cache

import numpy as np
import pytest

from miro_cy import Engine, SamplingParams
from miro_cy._kernels import select

BASE = {"threads": 1, "block_size": 32, "step_ms": 60_000}
#: (compute, KV dtype): every way to store keys and values.
STORES = [("fast", "fp16"), ("fast", "fp32"), ("fast", "int8"), ("bf16", "fp16"), ("bf16", "bf16"), ("exact", "fp32")]
#: Settings, and blocks of the pool where it is to be too small; 0: large enough.
SCHEDULES = {
    "roomy": ({}, 0),
    "chunks-of-7": ({"max_step_tokens": 7}, 0),
    "2-threads": ({"threads": 2, "max_step_tokens": 40}, 0),
    "blocks-of-16": ({"block_size": 16}, 0),
    "blocks-of-64": ({"block_size": 64, "max_step_tokens": 30}, 0),
    "no-prefix": ({"block_size": 16, "prefix_cache": False}, 0),
    "tiny-pool": ({"block_size": 16}, 8),
    "tiny-pool-of-32": ({"threads": 2, "max_step_tokens": 13}, 5),
    "tiny-no-prefix": ({"block_size": 16, "prefix_cache": False}, 9),
    "2-at-once": ({"block_size": 16, "max_num_seqs": 2, "max_step_tokens": 20}, 0),
    "reserve": ({"block_size": 16, "admission": "reserve", "threads": 2}, 12),
    "reserve-1-at-once": ({"admission": "reserve", "max_num_seqs": 1}, 6),
}
LENGTHS = (1, 15, 16, 17, 32, 50, 75)


def make_requests(vocab, n):
    """Prompts that end before, at and after a block's end; sampled, one of them greedy."""
    rng = np.random.default_rng(23)
    prompts = [{"tokens": rng.integers(0, vocab, length).astype(np.int32)} for length in LENGTHS]
    ways = [{"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 30}]
    ways = [ways[i % 3] for i in range(len(prompts))]
    ways[3] = {"temperature": 0}
    params = [
        SamplingParams(n=n, max_tokens=17 + i, seed=70 + i, logprobs=2, ignore_eos=True, **way)
        for i, way in enumerate(ways)
    ]
    return prompts, params


def bits(result):
    """Tokens, and the log-probabilities bit for bit."""
    values = [value for item in result.logprobs for value in (item.logprob, *(v for _, v in item.top))]
    return result.tokens, [i for item in result.logprobs for i, _ in item.top], np.array(values, np.float64).tobytes()


@pytest.fixture(params=STORES, ids=str)
def store(request):
    if request.param[0] == "bf16" and not select.has_tiles():
        pytest.skip("no tile registers (Intel AMX) here for compute bf16")
    return request.param


@pytest.fixture(scope="module")
def model(golden):
    return golden("llama").parents[2] / "gguf" / "Q4_1.gguf"


@pytest.fixture(scope="module")
def alone(model):
    """(prompts, parameters, the bits of each choice when its request is alone) with four choices; computed once."""

    @cache
    def compute(compute, kv_dtype):
        with Engine.load(model, **BASE, compute=compute, kv_dtype=kv_dtype, prefix_cache=False) as engine:
            prompts, params = make_requests(engine.vocab_size, 4)
            results = [engine.generate(*pair) for pair in zip(prompts, params, strict=True)]
            _, single = make_requests(engine.vocab_size, 1)
            firsts = [engine.generate(*pair) for pair in zip(prompts, single, strict=True)]
        return prompts, params, [[bits(c) for c in r.choices] for r in results], [bits(r) for r in firsts]

    return compute


def test_promise_batch_invariance_the_first_choice_is_the_only_one(alone, store):
    _, params, choices, firsts = alone(*store)
    assert [one[0] for one in choices] == firsts
    for one, way in zip(choices, params, strict=True):
        assert len({tuple(tokens) for tokens, _, _ in one}) == (1 if way.greedy else 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_promise_batch_invariance_of_choices(load, model, alone, store, schedule):
    compute, kv_dtype = store
    prompts, params, expected, _ = alone(compute, kv_dtype)
    settings, blocks = SCHEDULES[schedule]
    settings = {**BASE, "compute": compute, "kv_dtype": kv_dtype, "kv_memory": "64MiB", **settings}
    if blocks:
        with Engine.load(model, **BASE) as probe:
            block = probe._parts.spec.kv_bytes_per_token(kv_dtype) * settings["block_size"]
        settings["kv_memory"] = block * blocks
    engine = load(model, **settings)
    results = engine.generate(prompts, params)
    for i, (result, want) in enumerate(zip(results, expected, strict=True)):
        for choice, (got, alone_bits) in enumerate(zip(result.choices, want, strict=True)):
            assert bits(got) == alone_bits, f"prompt of {LENGTHS[i]}, choice {choice}"
    stats = engine.stats()
    assert (stats["preemptions"] > 0) == schedule.startswith("tiny"), stats
    assert stats["finished"] == len(prompts)
    assert stats["prompt_tokens"] == sum(LENGTHS)
    engine.check_integrity()
