"""Sampling parameters: names, defaults and limits.

Names and meanings follow vLLM; defaults are neutral (temperature 1, nothing filtered). Filters apply in the order
temperature, top_k, top_p. Log-probabilities are those of the raw logits, before any filter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from miro_client.checks import MAX_INT32, check_bool, check_choice, check_items, shown
from miro_cy.errors import BadField

#: Below this a temperature means greedy; from here up to MIN_TEMPERATURE it is raised to MIN_TEMPERATURE.
GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_LOGPROBS = 128
MAX_CHOICES = 64
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_SALT_BYTES = 256
MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 10.0
MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    n: how many texts to make of the prompt, 1 to 64; each draws for itself, the first as it would alone. Of a beam
        search: its n best hypotheses, at most beam_width; 1, the default, for all of them.
    max_tokens: most tokens to generate for each of them; 0 only checks and counts, or scores, the prompt; None means
        what is left of the context.
    temperature: 0 is greedy (argmax, ties to the lowest id); at most 2.
    top_k: keep the k most likely tokens, ties to the lowest id; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1].
    seed: draws are a function of (seed, choice, position) alone; None or -1 lets the engine pick one.
    stop: strings that end the text (not part of it); at most 64, each 1 to 1,024 bytes of UTF-8.
    stop_token_ids: token ids that end the text.
    ignore_eos: EOS is drawn like any token and ends nothing; stop_token_ids still do.
    logprobs: None for none, else how many of the most likely alternatives to report with each token (0 to 128).
    prompt_logprobs: the same for the tokens of the prompt, which is then computed afresh, also with max_tokens 0.
    cache_salt: the prompt's cached blocks are shared among requests of the same salt only; 1 to 256 bytes of UTF-8.
    beam_width: above 1 (at most 16) a beam search, whose hypotheses are the choices, best first, told when it is over.
    length_penalty: a hypothesis's score is its log-probability / its tokens ** length_penalty; -10 to 10.
    early_stopping: when beam_width hypotheses end the search: True at once, False when the best live beam would not
        better them if it ended now, "never" when it would not at its best length either.

    A beam search draws nothing: a temperature other than 0 or 1, top_k, top_p and stop strings are refused with it.
    Raises BadField naming the field when a value has the wrong type or is out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", _integer("n", self.n, 1, MAX_CHOICES))
        if self.max_tokens is not None:
            put(self, "max_tokens", _integer("max_tokens", self.max_tokens, 0, MAX_INT32))
        temperature = _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if temperature < GREEDY_TEMPERATURE:
            temperature = 0.0
        put(self, "temperature", max(temperature, MIN_TEMPERATURE) if temperature else 0.0)
        put(self, "top_k", max(0, _integer("top_k", self.top_k, -1, MAX_INT32)))
        put(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -1, MAX_UINT64)
            put(self, "seed", None if seed == -1 else seed)
        put(self, "stop", _stops(self.stop))
        put(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        check_bool("ignore_eos", self.ignore_eos, error=BadField)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt, MAX_SALT_BYTES)
        put(self, "beam_width", _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH))
        penalty = _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        put(self, "length_penalty", penalty)
        check_choice("early_stopping", self.early_stopping, (True, False, "never"), error=BadField)
        if self.beam_width > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        """Refuse what would have no effect on a beam search, and more choices than it has."""
        if self.n > self.beam_width:
            raise BadField(f"n is {self.n}, a beam search has beam_width {self.beam_width} choices", field="n")
        idle = {
            "temperature": self.temperature in (0.0, 1.0),
            "top_k": self.top_k == 0,
            "top_p": self.top_p == 1.0,
            "stop": not self.stop,
        }
        for name, is_idle in idle.items():
            if not is_idle:
                raise BadField(f"{name} has no meaning in a beam search (beam_width {self.beam_width})", field=name)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from untrusted keys and values. Raises BadField naming an unknown key or a bad value."""
        known = {f.name for f in fields(cls)}
        for key in mapping:
            if key not in known:
                name = key[:80] if isinstance(key, str) else shown(key)
                raise BadField(f"unknown sampling parameter {shown(key)}", field=name)
        return cls(**mapping)

    @property
    def n_choices(self) -> int:
        """Texts that come of a prompt."""
        return self.beam_width if self.n == 1 else self.n

    @property
    def n_sequences(self) -> int:
        """Sequences that a prompt may become at once."""
        return max(self.n, self.beam_width)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def _integer(name: str, value: object, low: int, high: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception:  # TypeError, or whatever an __index__ of somebody else's raises
        number = None
    if number is None or isinstance(value, bool):
        raise BadField(f"{name} must be an integer, not {shown(value)}", field=name)
    if not low <= number <= high:
        raise BadField(f"{name} must be between {low} and {high}, not {shown(number)}", field=name)
    return int(number)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    kind = type(value)
    if isinstance(value, (bool, str, bytes)) or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        raise BadField(f"{name} must be a number, not {shown(value)}", field=name)
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # too large, more than one, or whatever a __float__ of somebody else's raises
        raise BadField(f"{name} must be a finite number, not {shown(value)}", field=name) from None
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        bracket = "(" if open_low else "["
        raise BadField(f"{name} must be in {bracket}{low:g}, {high:g}], not {number!r}", field=name)
    return number


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if value is None:
        return ()
    stops = tuple(check_items("stop", value, MAX_STOPS, what="strings", error=BadField))
    for stop in stops:
        _check_text("stop", stop, MAX_STOP_BYTES)
    return stops


def _check_text(name: str, value: object, most: int) -> None:
    """Refuse what is no text of 1 to `most` bytes of UTF-8."""
    if not isinstance(value, str):
        raise BadField(f"{name} must be text, not {shown(value)}", field=name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadField(f"{name} must be valid Unicode text (a lone surrogate was found)", field=name) from None
    if not 1 <= size <= most:
        raise BadField(f"{name} must have 1 to {most} bytes, got {size}", field=name)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    name = "stop_token_ids"
    return tuple(_integer(name, item, 0, MAX_INT32) for item in check_items(name, value, MAX_STOPS, error=BadField))
