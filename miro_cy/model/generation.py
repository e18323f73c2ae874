"""What a checkpoint says about how to generate with it: tokens that end a text, and sampling to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miro_client.checks import shown
from miro_cy.errors import ModelFormatError

#: generation_config.json's names of sampling settings, which are also SamplingParams'; (least, largest) of each.
SAMPLING = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (-1, 2**31 - 1)}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """eos_ids: every token that ends a text. bos_id: the token that begins one, or None.

    sampling: what the model's makers sample with, by the names of SamplingParams; temperature 0 where they say that
    nothing is drawn, empty where they say nothing.
    """

    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)


def read_generation(
    config: Mapping[str, Any], label: str, stated: Mapping[str, Any], stated_label: str, vocab_size: int
) -> GenerationDefaults:
    """From config.json and generation_config.json (empty when there is none). EOS is the union of both.

    Raises ModelFormatError naming the file and the field.
    """
    sources = [(stated, stated_label), (config, label)]
    eos, bos = (
        [token_ids(values, key, name, vocab_size) for values, name in sources]
        for key in ("eos_token_id", "bos_token_id")
    )
    return GenerationDefaults(
        eos_ids=eos[0] | eos[1],
        bos_id=min(bos[0] or bos[1], default=None),  # generation_config.json's goes first
        sampling=_sampling(stated, stated_label),
    )


def token_ids(values: Mapping[str, Any], key: str, label: str, vocab_size: int) -> frozenset[int]:
    """The ids under a key: an integer, a list of them, or null."""
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ModelFormatError(f"{label}: {key} must be token ids below {vocab_size}, not {shown(token)}")
    return frozenset(ids)


def _sampling(stated: Mapping[str, Any], label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, (least, largest) in SAMPLING.items():
        value = stated.get(key)
        if value is None:
            continue
        kinds = int if key == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ModelFormatError(f"{label}: {key} must be a number, not {shown(value)}")
        if not least <= value <= largest:
            raise ModelFormatError(f"{label}: {key} must be between {least} and {largest}, not {shown(value)}")
        found[key] = value
    if found.get("top_p") == 0:  # the likeliest token always stays: this is how these files spell greedy
        del found["top_p"]
        found["top_k"] = 1
    draws = stated.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise ModelFormatError(f"{label}: do_sample must be true or false, not {shown(draws)}")
    # The library that writes these files samples only when told to, whatever else is stated.
    return found if draws else {"temperature": 0.0} if draws is False else {}
