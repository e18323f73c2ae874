"""SamplingParams: every field's type and limits, and what out-of-range input says."""

import runpy
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy import SamplingParams
from miro_cy.errors import BadField
from miro_cy.sampling.params import (
    MAX_BEAM_WIDTH,
    MAX_INT32,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_UINT64,
    MIN_TEMPERATURE,
)

BAD = runpy.run_path(str(Path(__file__).parents[1] / "bad_sampling.py"))["BAD"]
FIELDS = [field.name for field in fields(SamplingParams)]


def test_every_field_has_bad_values():
    assert list(BAD) == FIELDS


@pytest.mark.parametrize(("name", "at"), [(name, at) for name in FIELDS for at in range(len(BAD[name]))])
def test_bad_values_are_refused_by_name(name, at):
    with pytest.raises(BadField, match=name) as caught:
        SamplingParams(**{name: BAD[name][at]})
    assert caught.value.field == name
    assert len(str(caught.value)) < 300
    with pytest.raises(BadField) as caught:
        SamplingParams.from_mapping({name: BAD[name][at]})
    assert caught.value.field == name


def test_an_endless_list_of_stops_is_refused():
    def endless():
        while True:
            yield "a"

    with pytest.raises(BadField, match="at most 64"):
        SamplingParams(stop=endless())
    with pytest.raises(BadField, match="at most 64"):
        SamplingParams(stop_token_ids=iter(lambda: 1, 2))


def test_unknown_names_are_refused():
    for name in ("tempreature", "", "x" * 10_000, 3):
        with pytest.raises(BadField, match="unknown sampling parameter") as caught:
            SamplingParams.from_mapping({name: 1})
        assert len(str(caught.value)) < 300
        assert len(caught.value.field) <= 80


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (None, 1.0, 0, 1.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (None, (), (), False)
    assert params.logprobs is None
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (1, 1.0, False)
    assert not params.greedy


def test_limits_themselves_are_accepted():
    low = SamplingParams(max_tokens=0, temperature=0, top_k=-1, top_p=1e-9, seed=0, logprobs=0)
    assert (low.top_k, low.seed, low.greedy) == (0, 0, True)
    SamplingParams(
        max_tokens=MAX_INT32, temperature=2, top_k=MAX_INT32, top_p=1, seed=MAX_UINT64, logprobs=MAX_LOGPROBS,
        stop=["é" * (MAX_STOP_BYTES // 2)] * MAX_STOPS, stop_token_ids=[MAX_INT32] * MAX_STOPS, ignore_eos=True,
    )  # fmt: skip
    for sign in (-1, 1):
        SamplingParams(
            beam_width=MAX_BEAM_WIDTH, length_penalty=sign * MAX_LENGTH_PENALTY, early_stopping="never",
            stop_token_ids=[1] * MAX_STOPS, logprobs=MAX_LOGPROBS, ignore_eos=True, seed=3, temperature=0,
        )  # fmt: skip


@pytest.mark.parametrize(
    "other", [{"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 5}, {"top_k": 1}, {"top_p": 0.9}, {"stop": ["a"]}]
)
def test_what_means_nothing_to_a_beam_search_is_refused_with_it(other):
    (name,) = other
    SamplingParams(**other)
    with pytest.raises(BadField, match=f"{name} has no meaning in a beam search") as caught:
        SamplingParams(beam_width=2, **other)
    assert caught.value.field == name
    assert SamplingParams(beam_width=2, temperature=1.0, top_k=-1, top_p=1, stop=[]).beam_width == 2


def test_what_is_written_differently_means_the_same():
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(seed=-1).seed is None
    numbers = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=Fraction(1, 2), seed=np.uint64(9)
    )
    assert numbers == SamplingParams(max_tokens=3, temperature=0.5, top_p=0.5, seed=9)
    assert all(type(v) in (int, float) for v in (numbers.max_tokens, numbers.temperature, numbers.top_p, numbers.seed))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-300, 9e-6])
def test_tiny_temperatures_are_greedy(value):
    params = SamplingParams(temperature=value)
    assert params.temperature == 0
    assert params.greedy


@pytest.mark.parametrize("value", [1e-5, 0.005, MIN_TEMPERATURE])
def test_small_temperatures_are_raised_to_the_least_that_is_sound(value):
    assert SamplingParams(temperature=value).temperature == MIN_TEMPERATURE


def test_top_k_of_one_is_greedy():
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams(top_k=2).greedy


@given(
    name=st.sampled_from(FIELDS),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=6,
    ),
)
def test_any_value_is_taken_or_refused_by_name(name, value):
    refused = None
    try:
        params = SamplingParams.from_mapping({name: value})
    except BadField as error:
        refused = error
    if refused is None:
        assert SamplingParams.from_mapping({name: getattr(params, name)}) == params
    else:
        assert refused.field == name
