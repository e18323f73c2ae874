"""Single kernels, at SmolLM2's and TinyLlama's shapes: pytest bench/kernels --benchmark-only."""

import numpy as np
import pytest

from miro_cy._kernels import ops, reference, select
from miro_cy._kernels.weights import PackedWeights
from miro_cy.batch import BatchView

THREADS = 2
SHAPES = [(1536, 576), (5632, 2048)]
RNG = np.random.default_rng(0)


def rows(m, k):
    return RNG.standard_normal((m, k)).astype(np.float32)


@pytest.fixture
def tiles():
    """The kernels with tile registers, which MIRO_ISA does not choose."""
    if not select.has_tiles():
        pytest.skip("no tile registers")
    before = select.active_isa()
    select.use(select.TILES)
    yield
    select.use(before)


@pytest.mark.parametrize("m", [1, 8, 32, 256])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "fast"),
    [
        ("F32", False),
        ("F16", False),
        ("BF16", False),
        ("Q8_0", True),
        ("Q4_0", True),
        ("Q4_1", True),
        ("Q6_K", True),
        ("Q4_1", False),
    ],
)
def test_matmul(benchmark, kind, fast, n, k, m):
    if kind == "Q6_K" and k % 256:
        pytest.skip("Q6_K rows are multiples of 256")
    w = PackedWeights(reference.random_raw(RNG, kind, n, k), kind, n, k, THREADS)
    x = rows(m, k)
    benchmark(ops.matmul, w, x, fast, THREADS)
    benchmark.extra_info["gflops"] = 2 * m * n * k / benchmark.stats["median"] / 1e9
    benchmark.extra_info["weight_gb_s"] = w.nbytes / benchmark.stats["median"] / 1e9


@pytest.mark.parametrize("m", [1, 8, 32, 256])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("kind", "rounded"), [("F16", False), ("Q8_0", True), ("Q4_1", True)])
def test_matmul_in_tiles(benchmark, tiles, kind, rounded, n, k, m):
    w = PackedWeights(reference.random_raw(RNG, kind, n, k), kind, n, k, THREADS)
    benchmark(ops.matmul, w, rows(m, k), rounded, THREADS)
    benchmark.extra_info["gflops"] = 2 * m * n * k / benchmark.stats["median"] / 1e9
    benchmark.extra_info["weight_gb_s"] = w.nbytes / benchmark.stats["median"] / 1e9


@pytest.mark.parametrize("m", [1, 8, 256])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_swiglu_i8(benchmark, kind, m):
    n, k = 1536, 576
    gate, up = (PackedWeights(reference.random_raw(RNG, kind, n, k), kind, n, k, THREADS) for _ in range(2))
    benchmark(ops.swiglu_i8, gate, up, rows(m, k), None, None, THREADS)


@pytest.mark.parametrize("n_tok", [1, 256])
@pytest.mark.parametrize("context", [512, 2048])
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
def test_attention(benchmark, dtype, context, n_tok):
    attend(benchmark, dtype, context, n_tok)


@pytest.mark.parametrize("n_tok", [1, 256])
@pytest.mark.parametrize("context", [512, 2048])
def test_attention_in_tiles(benchmark, tiles, context, n_tok):
    attend(benchmark, "bf16", context, n_tok)


def attend(benchmark, dtype, context, n_tok):
    heads, kv_heads, d, block = 9, 3, 64, 32
    store = ops.KVStore(context // block, kv_heads, d, block, dtype)
    view = BatchView(1, context, np.arange(context // block, dtype=np.int32).reshape(1, 1, -1))
    view.add_row(0, 0, np.zeros(context, np.int32), 1)
    store.write(
        view,
        RNG.standard_normal((context, kv_heads, d)).astype(np.float32),
        np.ones((context, kv_heads, d), np.float32),
    )
    view.clear()
    view.add_row(0, context - n_tok, np.zeros(n_tok, np.int32), 1)
    q = RNG.standard_normal((n_tok, heads, d)).astype(np.float32)
    benchmark(store.attend, view, q, 0.125, 0.0, 0, THREADS)


@pytest.mark.parametrize("m", [1, 256])
def test_quantise(benchmark, m):
    benchmark(ops.quantise, rows(m, 2048), THREADS)


@pytest.mark.parametrize("m", [1, 256])
def test_add_rmsnorm(benchmark, m):
    benchmark(ops.add_rmsnorm, rows(m, 2048), rows(1, 2048)[0], 1e-5, rows(m, 2048), None, THREADS)


@pytest.mark.parametrize("m", [1, 256])
def test_swiglu(benchmark, m):
    benchmark(ops.swiglu, rows(m, 5632), rows(m, 5632), None, None, THREADS)


@pytest.mark.parametrize("n_tok", [1, 256])
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
def test_rope_and_kv_write(benchmark, dtype, n_tok):
    view = BatchView(1, n_tok, np.arange(16, dtype=np.int32).reshape(1, 1, -1))
    view.add_row(0, 0, np.zeros(n_tok, np.int32), 1)
    cos, sin = rows(512, 32), rows(512, 32)
    k = RNG.standard_normal((n_tok, 4, 64)).astype(np.float32)
    store = ops.KVStore(16, 4, 64, 32, dtype)

    def run():
        ops.rope(view, k, cos, sin, None, THREADS)
        store.write(view, k, k, THREADS)

    benchmark(run)


@pytest.mark.parametrize("n_tok", [1, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_of_normed_heads(benchmark, normed, n_tok):
    """Qwen3 0.6B's queries; without the norm, what it comes on top of."""
    view = BatchView(1, n_tok, np.zeros((1, 1, 16), np.int32))
    view.add_row(0, 0, np.zeros(n_tok, np.int32), 1)
    cos, sin = rows(512, 64), rows(512, 64)
    q, norm = RNG.standard_normal((n_tok, 16, 128)).astype(np.float32), rows(1, 128)[0]
    benchmark(ops.rope, view, q, cos, sin, None, THREADS, norm if normed else None, 1e-6)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_embed(benchmark, kind):
    w = PackedWeights(reference.random_raw(RNG, kind, 4096, 576), kind, 4096, 576, THREADS)
    ids = RNG.integers(0, 4096, 256).astype(np.int32)
    benchmark(ops.embed, w, ids, THREADS)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q6_K"])
def test_pack(benchmark, kind):
    raw = reference.random_raw(RNG, kind, 2048, 2048)
    benchmark(PackedWeights, raw, kind, 2048, 2048, THREADS)


@pytest.mark.parametrize("name", ["argmax", "logsumexp", "log_softmax"])
def test_logits(benchmark, name):
    benchmark(getattr(ops, name), rows(1, 49152)[0])


def test_top_k(benchmark):
    benchmark(ops.top_k, rows(1, 49152)[0], 64)


def test_draw(benchmark):
    benchmark(ops.draw, rows(1, 49152)[0], 1.0, 0.7)
