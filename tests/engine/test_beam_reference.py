"""Beam search by transformers: the same hypotheses and scores when every beam is computed again from its first token.

Slow and simple, with nothing between the search and the model's logits: what the engine's own beams must equal.
"""

import json
from pathlib import Path

import pytest

from miro_cy.errors import UnsupportedModel
from miro_cy.sampling.beam import BeamSearch
from miro_cy.sampling.sampler import top_logprobs

CASES = json.loads((Path(__file__).parents[1] / "data" / "golden" / "beam.json").read_text())
#: The reference's scores have five decimals, of sums in float32.
TOLERANCE = 1e-4


@pytest.fixture
def engine_for(load, golden, request):
    """An engine for a reference model by name, from the repository or the larger reference data."""

    def make(name):
        path = golden(name)
        if not path.exists():
            path = request.getfixturevalue("reference_data") / "hf" / name
        try:
            return load(path, threads=1)
        except UnsupportedModel as error:
            pytest.skip(str(error))

    return make


def search_from_scratch(engine, prompt, search):
    """Drive a search by whole prompts, one live beam after the other."""
    prefixes = [[]]
    while not search.done:
        logits = [engine.logits(prompt + prefix, rows=slice(-1, None)) for prefix in prefixes]
        moves = search.advance([top_logprobs(rows, 0, search.row_size) for rows in logits])
        prefixes = [[*prefixes[at], token] for at, token in moves]
    return search.hypotheses()


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c['model']}-{c['beam_width']}-{c['length_penalty']}-{c['early_stopping']}"
)
def test_hypotheses_and_scores_are_those_of_transformers(engine_for, case):
    search = BeamSearch(
        case["beam_width"],
        case["max_tokens"],
        [case["eos"]],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )
    got = search_from_scratch(engine_for(case["model"]), case["ids"], search)
    assert [list(item.tokens) for item in got] == case["hypotheses"]
    assert [item.score for item in got] == pytest.approx(case["scores"], abs=TOLERANCE)
