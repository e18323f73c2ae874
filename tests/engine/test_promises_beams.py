"""Promises 1 to 3 for beam search: transformers' hypotheses, the same bits in any schedule, all blocks given back."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.requests import Request
from miro_cy.sampling.beam import BeamSearch
from miro_cy.sampling.sampler import top_logprobs

CASES = json.loads((Path(__file__).parents[1] / "data" / "golden" / "beam.json").read_text())
MODELS = sorted({case["model"] for case in CASES})
#: The reference's scores have five decimals, of sums in float32.
TOLERANCE = 1e-4
OTHERS = [
    ({"tokens": list(range(5, 5 + n))}, SamplingParams(max_tokens=60 - n // 2, seed=n, ignore_eos=True, n=1 + n % 2))
    for n in (3, 40, 17, 32)
]
#: Settings, and blocks of the pool where it is to be too small; 0: large enough.
SCHEDULES = {
    "blocks-of-32": ({"block_size": 32}, 0),
    "blocks-of-16": ({"block_size": 16}, 0),
    "no-prefix": ({"block_size": 16, "prefix_cache": False}, 0),
    "chunks-of-5": ({"max_step_tokens": 5}, 0),
    "2-threads": ({"threads": 2, "block_size": 16}, 0),
    "tiny": ({"block_size": 16}, 6),
    "tiny-of-32": ({"block_size": 32}, 4),
    "tiny-no-prefix": ({"block_size": 16, "prefix_cache": False}, 7),
    "too-small-for-the-beams": ({"block_size": 32}, 3),
    "reserve": ({"block_size": 16, "admission": "reserve"}, 8),
    "2-at-once": ({"block_size": 16, "max_num_seqs": 2}, 0),
    "1-at-once": ({"max_num_seqs": 1}, 0),
}


@pytest.fixture
def open_model(load, golden):
    """open_model(name, blocks, ...): an engine, its pool of so many blocks."""

    def make(name, blocks=0, **settings):
        settings = {"threads": 1, **settings}
        quantised = golden("llama").parents[2] / "gguf" / f"{name}.gguf"
        path = quantised if name.isupper() else golden(name)
        if blocks:
            parts = load(path, threads=1)._parts
            settings["kv_memory"] = parts.spec.kv_bytes_per_token(parts.kv_dtype) * settings["block_size"] * blocks
        return load(path, **settings)

    return make


@pytest.fixture(scope="module")
def from_scratch(golden):
    """The hypotheses of a model's cases when every beam is computed again from its first token, with nothing shared.

    Slow and simple, with nothing between the search and the model's logits: what the engine's own beams must equal.
    """

    def search(engine, case):
        one = BeamSearch(
            case["beam_width"],
            case["max_tokens"],
            [case["eos"]],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            n_logprobs=3,
        )
        while not one.done:
            beams = [case["ids"] + one.tokens(at) for at in range(one.n_live)]
            logits = [engine.logits(tokens, rows=slice(-1, None)) for tokens in beams]
            one.advance([top_logprobs(row, 0, one.row_size) for row in logits])
        return one.hypotheses()

    @cache
    def compute(name):
        with Engine.load(golden(name), threads=1, prefix_cache=False) as engine:
            return [search(engine, case) for case in cases_of(name)]

    return compute


def cases_of(model):
    return [case for case in CASES if case["model"] == model]


def asked(case):
    params = SamplingParams(
        beam_width=case["beam_width"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        max_tokens=case["max_tokens"],
        stop_token_ids=[case["eos"]],
        ignore_eos=True,
        logprobs=3,
    )
    return {"tokens": case["ids"]}, params


def bits(choice):
    """Tokens, and score and log-probabilities bit for bit."""
    values = [choice.score, *(v for item in choice.logprobs for v in (item.logprob, *(top for _, top in item.top)))]
    ids = [i for item in choice.logprobs for i, _ in item.top]
    return [*choice.tokens], choice.finish_reason, ids, np.array(values, np.float64).tobytes()


@pytest.mark.parametrize("model", MODELS)
def test_hypotheses_and_scores_are_those_of_transformers(from_scratch, model):
    for case, found in zip(cases_of(model), from_scratch(model), strict=True):
        assert [list(item.tokens) for item in found] == case["hypotheses"]
        assert [item.score for item in found] == pytest.approx(case["scores"], abs=TOLERANCE)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize(
    ("model", "schedule"),
    [*(("llama", schedule) for schedule in SCHEDULES), ("qwen3", "blocks-of-16"), ("qwen3", "tiny-of-32")],
)
def test_promise_batch_invariance_of_beams(open_model, from_scratch, is_whole, model, schedule, together):
    expected = [[bits(item) for item in found] for found in from_scratch(model)]
    settings, blocks = SCHEDULES[schedule]
    engine = open_model(model, blocks, **settings)
    requests = [asked(case) for case in cases_of(model)]
    if together:
        pairs = [pair for both in zip(requests, [*OTHERS, OTHERS[0]], strict=True) for pair in both]
        results = engine.generate(*map(list, zip(*pairs, strict=True)))[::2]
    else:
        results = [engine.generate(*request) for request in requests]
    for result, want, case in zip(results, expected, cases_of(model), strict=True):
        assert [bits(choice) for choice in result.choices] == want
        assert (result.tokens, result.score) == (result.choices[0].tokens, result.choices[0].score)
        for choice in result.choices:
            assert (choice.usage.prompt_tokens, choice.usage.completion_tokens) == (20, len(choice.tokens))
            assert choice.stop == (case["eos"] if choice.finish_reason == "stop" else None)
    if together and schedule.startswith(("tiny", "too-small")):
        assert engine.stats()["preemptions"] > 0
    assert is_whole(engine)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_promise_batch_invariance_of_long_beams(open_model, schedule):
    check_long_beams(open_model, "llama", None, schedule)


@pytest.mark.parametrize("schedule", ["chunks-of-5", "2-threads", "tiny-of-32", "1-at-once"])
def test_promise_batch_invariance_of_long_beams_of_quantised_weights(open_model, quantised_mode, schedule):
    check_long_beams(open_model, "Q4_1", quantised_mode, schedule)


def check_long_beams(open_model, name, mode, schedule):
    """Searches that grow by many blocks, several at once: those of a pool that is too small preempt each other."""
    params = [
        SamplingParams(beam_width=width, max_tokens=50 + width, ignore_eos=True, early_stopping="never", logprobs=1)
        for width in (2, 3, 5)
    ]
    prompts = [{"tokens": list(range(1 + width, 30 + 9 * width))} for width in range(3)]
    roomy = open_model(name, compute=mode, prefix_cache=False)
    expected = [[bits(c) for c in roomy.generate(*pair).choices] for pair in zip(prompts, params, strict=True)]
    settings, blocks = SCHEDULES[schedule]
    engine = open_model(name, blocks and blocks + 96 // settings["block_size"], compute=mode, **settings)
    results = engine.generate(prompts, params)
    assert [[bits(choice) for choice in result.choices] for result in results] == expected
    if schedule.startswith(("tiny", "too-small")):
        assert engine.stats()["preemptions"] > 0
    engine.check_integrity()


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}, {"admission": "reserve"}], ids=str)
def test_promise_conservation_whoever_comes_and_goes(open_model, from_scratch, settings):
    """Beams, choices and single texts arrive, are cancelled and preempted, in pools of every small size."""
    cases = cases_of("llama")
    expected = [[bits(item) for item in found] for found in from_scratch("llama")]
    for blocks in range(6, 13):
        rng = np.random.default_rng(blocks)
        engine = open_model("llama", blocks, block_size=16, max_num_seqs=int(rng.integers(1, 12)), **settings)
        wanted, ends, steps = {}, {}, 0
        while engine.has_work or len(wanted) < 24:
            if rng.random() < 0.3 and len(wanted) < 24:
                at = int(rng.integers(0, 2 * len(cases)))
                prompt, params = asked(cases[at]) if at < len(cases) else OTHERS[at % 2 * 2]
                wanted[engine.add(Request(prompt, params))] = (at, params.n_choices)
            if rng.random() < 0.03 and wanted:
                engine.abort(int(rng.choice([*wanted])))
            for event in engine.step():
                if event.finish_reason is not None:
                    assert (event.request_id, event.choice) not in ends
                    ends[event.request_id, event.choice] = event
            engine.check_integrity()
            steps += 1
            assert steps < 10_000
        assert sorted(ends) == [(request, i) for request, (_, n) in wanted.items() for i in range(n)]
        for (request, choice), event in ends.items():
            at = wanted[request][0]
            if at < len(cases) and event.finish_reason != "cancelled":
                assert bits(event) == expected[at][choice]
        stats = engine.stats()
        assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
