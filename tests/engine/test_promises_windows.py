"""Promise 1 with sliding windows: blocks that left a window are given back, and no bit depends on it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from miro_cy import Engine, SamplingParams, loading
from miro_cy._kernels import select
from miro_cy.cache.block_table import BlockTables
from miro_cy.model import hf_llama
from miro_cy.model.spec import AttentionSpec

BASE = {"threads": 1, "block_size": 16, "step_ms": 60_000}
WAYS = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.0}]
#: Windows of the two layers; None: as the model's file has it.
WINDOWS = {"mistral": None, "one-layer": (0, 40), "two-windows": (70, 24)}
NEEDS_TILES = pytest.mark.skipif(not select.has_tiles(), reason="no tile registers (Intel AMX) here for compute bf16")
#: How the file, which is of floats, is computed, and what its KV cache is of.
STORES = ["exact-fp32", "fast-fp16", "fast-int8"]
STORES += [pytest.param(name, marks=NEEDS_TILES) for name in ("bf16-fp16", "bf16-bf16")]
#: What it is by default, and attention in tile registers.
FEW_STORES = [STORES[0], STORES[-1]]
SETTINGS = [
    {},
    {"max_step_tokens": 7},
    {"max_step_tokens": 512, "threads": 2},
    {"block_size": 32, "max_step_tokens": 50, "threads": 2},
    {"block_size": 64, "max_num_seqs": 3},
]


def workload(vocab, count=18, short=6):
    """Prompts longer and shorter than a window, of two families that begin alike; first some that all must grow."""
    rng = np.random.default_rng(31)
    families = [rng.integers(0, vocab, 200).astype(np.int32) for _ in range(2)]
    prompts, params = [], []
    for i in range(count):
        shared = int(rng.choice([0, 16, 33, 100, 128, 200])) if i >= short else 0
        tail = rng.integers(0, vocab, int(rng.integers(1, 60 if i >= short else 10))).astype(np.int32)
        prompts.append({"tokens": np.concatenate([families[i % 2][:shared], tail])})
        way = WAYS[i % len(WAYS)]
        max_tokens = 10 + i * 7 % 50 if i >= short else 60
        params.append(SamplingParams(max_tokens=max_tokens, seed=80 + i, logprobs=2, ignore_eos=True, **way))
    return prompts, params


def bits(result):
    values = [value for item in result.logprobs for value in (item.logprob, *(v for _, v in item.top))]
    return result.tokens, np.array(values, np.float64).tobytes()


def assert_same(got, expected):
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert bits(one) == bits(other), f"request {i} differs"


@pytest.fixture(scope="module")
def path(golden):
    return golden("mistral-swa").parent  # a folder; there is no GGUF file of it


def put_windows(patch, name):
    """Have every folder load with other windows than its file says."""
    read_spec, windows = hf_llama.read_spec, WINDOWS[name]
    if windows is not None:
        layers = tuple(AttentionSpec(window) for window in windows)
        patch.setattr(hf_llama, "read_spec", lambda config: replace(read_spec(config), layers=layers))


@pytest.fixture
def windows(request, monkeypatch):
    put_windows(monkeypatch, request.param)
    return request.param


@pytest.fixture(scope="module")
def alone(path):
    """(prompts, parameters, what each gives alone in an engine that gives nothing back); computed once."""

    @cache
    def compute(name, store):
        with pytest.MonkeyPatch.context() as patch:
            put_windows(patch, name)
            patch.setattr(loading, "BlockTables", lambda groups, slots, width, _: BlockTables(groups, slots, width))
            with Engine.load(path, **BASE, **kv(store), kv_memory="8MiB", prefix_cache=False) as engine:
                prompts, params = workload(engine.vocab_size)
                return prompts, params, [engine.generate(*pair) for pair in zip(prompts, params, strict=True)]

    return compute


def kv(store):
    """Settings for one of STORES."""
    return dict(zip(("compute", "kv_dtype"), store.split("-"), strict=True))


def pool_of(engine, blocks):
    """kv_memory for a pool of that many blocks, which hold one layer group each."""
    spec, groups = engine._parts.spec, engine._parts.executor.groups
    return groups.size * spec.kv_bytes_per_layer(engine._parts.kv_dtype) * engine.config.block_size * blocks


def poison(engine, view):
    """Overwrite every block whose content nobody may read any more."""
    pool, executor = engine._parts.core._pool, engine._parts.executor
    needed = {source for _, source, _ in view.copies()}
    gone = [
        block
        for block in range(pool.n_blocks)
        if pool.refcount(block) == 0 and (pool.index is None or pool.index.entry(block) is None) and block not in needed
    ]
    for layer in executor.kv_layers:
        for array in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if array is not None:
                array[gone] = {np.int8: 77, np.uint16: 0x7FC0}.get(array.dtype.type, np.nan)  # bfloat16 is its bits


@pytest.mark.parametrize("windows", WINDOWS, indirect=True)
def test_the_window_makes_a_difference(path, load, alone, windows):
    prompts, _, expected = alone(windows, "exact-fp32")
    others = alone(next(name for name in WINDOWS if name != windows), "exact-fp32")[2]
    assert sum(one.tokens != other.tokens for one, other in zip(expected, others, strict=True)) > len(prompts) // 2


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("windows", WINDOWS, indirect=True)
def test_promise_batch_invariance_with_windows(path, load, alone, steer, windows, settings, store):
    """Together, with prefix hits, and what was given back overwritten before every step."""
    prompts, params, expected = alone(windows, store)
    engine = load(path, **{**BASE, **kv(store), "kv_memory": "8MiB", **settings})
    assert f"-{store}-" in engine.fingerprint
    steer(engine).before = lambda view: poison(engine, view)
    for _ in range(2):
        assert_same(engine.generate(prompts, params), expected)
        engine.check_integrity()
    assert engine.stats()["cached_tokens"] > 300


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("blocks", [22, 30])
@pytest.mark.parametrize("store", FEW_STORES)
@pytest.mark.parametrize("windows", WINDOWS, indirect=True)
def test_promise_batch_invariance_with_windows_under_preemption(
    path, load, alone, steer, windows, store, blocks, prefix_cache
):
    prompts, params, expected = alone(windows, store)
    probe = load(path, **BASE, **kv(store))
    blocks = blocks // 3 if windows == "mistral" else blocks
    engine = load(path, **BASE, **kv(store), kv_memory=pool_of(probe, blocks), prefix_cache=prefix_cache)
    assert engine.stats()["total_blocks"] == blocks
    steer(engine).before = lambda view: poison(engine, view)
    for _ in range(2):
        assert_same(engine.generate(prompts, params), expected)
        engine.check_integrity()
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("store", FEW_STORES)
@pytest.mark.parametrize("windows", WINDOWS, indirect=True)
def test_promise_batch_invariance_with_windows_scored(path, load, alone, windows, store):
    prompts, _, expected = alone(windows, store)
    engine = load(path, **{**BASE, **kv(store), "max_step_tokens": 23}, kv_memory="8MiB")
    for prompt, result in zip(prompts, expected, strict=True):
        ids = [*prompt["tokens"].tolist(), *result.tokens[:-1]]
        rows = engine.logits(ids, rows=slice(len(prompt["tokens"]) - 1, None), log_softmax=True)
        assert [item.logprob for item in result.logprobs] == [
            row[t] for row, t in zip(rows, result.tokens, strict=True)
        ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"blocks": 26, "max_step_tokens": 19}, {"blocks": 40, "admission": "reserve"}, {"prefix_cache": False}],
    ids=str,
)
@pytest.mark.parametrize("store", FEW_STORES)
@pytest.mark.parametrize("windows", WINDOWS, indirect=True)
def test_promise_batch_invariance_with_windows_of_choices(path, load, alone, steer, windows, store, settings):
    """Forks share what their windows see; each choice is what it is in a large pool, alone."""
    prompts, params, _ = alone(windows, store)
    params = [replace(p, n=3, temperature=0.9) for p in params]
    roomy = load(path, **BASE, **kv(store), kv_memory="8MiB", prefix_cache=False)
    expected = [roomy.generate(*pair).choices for pair in zip(prompts, params, strict=True)]
    assert any(len({tuple(choice.tokens) for choice in choices}) == 3 for choices in expected)
    settings = dict(settings)
    kv_memory = pool_of(roomy, settings.pop("blocks")) if "blocks" in settings else "8MiB"
    engine = load(path, **{**BASE, **kv(store), **settings}, kv_memory=kv_memory)
    steer(engine).before = lambda view: poison(engine, view)
    for got, want in zip(engine.generate(prompts, params), expected, strict=True):
        assert_same(got.choices, want)
    engine.check_integrity()
    assert engine.stats()["preemptions"] == 0 or settings.get("admission") != "reserve"


def test_a_long_answer_holds_no_more_than_its_window(path, load, steer):
    engine = load(path, **BASE, prefix_cache=False)
    pool, held = engine._parts.core._pool, []
    steer(engine).before = lambda view: held.append(pool.n_blocks - pool.available())
    prompt = {"tokens": list(range(1, 301))}
    result = engine.generate(prompt, SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    assert len(result.tokens) == 200
    assert max(held[-199:]) == 3, "a window of 24 touches three blocks of 16 at most"
    assert pool.available() == pool.n_blocks


def test_the_pool_can_be_smaller_than_the_context(path, load):
    """Three blocks of 16 tokens serve 500 when every layer sees 24."""
    probe = load(path, **BASE)
    expected = probe.generate({"tokens": [5] * 450}, SamplingParams(max_tokens=50, temperature=0, logprobs=1))
    engine = load(path, **BASE, kv_memory=pool_of(probe, 3))
    assert (engine.stats()["total_blocks"], engine.context) == (3, 512)
    got = engine.generate({"tokens": [5] * 450}, SamplingParams(max_tokens=50, temperature=0, logprobs=1))
    assert bits(got) == bits(expected)


@pytest.mark.parametrize("windows", ["one-layer"], indirect=True)
def test_what_a_model_takes(path, load, windows):
    """A block holds one layer of the two, and both groups' layers are stored in the same arrays."""
    engine = load(path, **BASE, kv_memory="1MiB")
    parts = engine._parts
    assert parts.executor.groups.windows == (0, 40)
    assert len(parts.executor.kv_layers) == 1
    layer = parts.spec.kv_bytes_per_layer("fp32")
    assert parts.spec.kv_bytes_per_token("fp32") == 2 * layer
    assert parts.executor.kv_bytes == engine.stats()["total_blocks"] * 16 * layer <= 2**20
    assert parts.capacity == engine.stats()["total_blocks"] // 2 * 16
