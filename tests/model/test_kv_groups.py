"""Layer groups by window: equal in size, every layer once, little padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.model.kv_groups import MOST_PADDING, kv_groups
from miro_cy.model.spec import AttentionSpec, ModelSpec, RopeSpec

SPEC = ModelSpec(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    context=8192,
    norm_eps=1e-5,
    rope=RopeSpec(10_000.0, 16),
    layers=(),
    tied_output=False,
)


def spec_of(*windows: int) -> ModelSpec:
    return replace(SPEC, layers=tuple(AttentionSpec(window) for window in windows))


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ([0] * 80, 80, (0,)),
        ([4096] * 32, 32, (4096,)),
        ([8192] * 32, 32, (0,)),  # as long as the context: no window
        ([512, 0] * 13, 13, (0, 512)),
        (([512] * 5 + [0]) * 3, 3, (0, 512, 512, 512, 512, 512)),
        ([*([512] * 5 + [0]) * 4, 512, 512], 4, (0, *[512] * 6)),  # 22 layers with a window take 24 places
        ([512] * 7 + [0] * 3, 1, (*[0] * 3, *[512] * 7)),
        ([100, 200, 0], 1, (0, 200, 100)),
    ],
)
def test_groups(windows: list[int], size: int, groups: tuple[int, ...]) -> None:
    found = kv_groups(spec_of(*windows))
    assert (found.size, found.windows) == (size, groups)


@given(st.lists(st.sampled_from([0, 128, 512, 10_000]), min_size=1, max_size=60))
def test_every_layer_has_its_place(windows: list[int]) -> None:
    spec = spec_of(*windows)
    groups, places = kv_groups(spec), kv_groups(spec).places()
    assert len(places) == len(set(places)) == len(windows)
    for window, (group, place) in zip(windows, places, strict=True):
        assert 0 <= place < groups.size
        assert groups.windows[group] == (window if window < spec.context else 0)
    assert len(groups.layers[0]) == groups.size, "the first group is full"
    assert groups.windows[0] == 0 or 0 not in groups.windows
    assert groups.size * len(groups.windows) <= len(windows) * (1 + MOST_PADDING)
