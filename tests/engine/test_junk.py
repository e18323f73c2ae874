"""Whatever is put where a prompt, its parameters or token ids belong, the typed error naming it is all that comes."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy import Engine, SamplingParams
from miro_cy.errors import BadField, ConfigError, ContextOverflow
from miro_cy.requests import Request

SHARED = runpy.run_path(str(Path(__file__).parents[1] / "junk.py"))
JUNK, check = SHARED["JUNK"], SHARED["check"]
ONE = SamplingParams(temperature=0, max_tokens=1)
#: An endless prompt is too long.
REFUSALS = (BadField, ContextOverflow)
#: What goes beside the one field that is junk.
PLACES: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
    (lambda value: value, ("prompt", "tokens", "messages")),
    (lambda value: {"tokens": value}, ("tokens", "prompt")),
    (lambda value: {"tokens": [value]}, ("tokens",)),
    (lambda value: {"messages": value}, ("messages",)),
    (lambda value: {"messages": [value]}, ("messages",)),
    (lambda value: {"messages": [{"role": value, "content": "a"}]}, ("messages[0].role",)),
    (lambda value: {"messages": [{"role": "user", "content": value}]}, ("messages[0].content", "prompt")),
    (lambda value: {"messages": [{"role": "user", "content": "a", "name": value}]}, ("messages[0].name",)),
]


@pytest.fixture(scope="module")
def engine(text_model: Path) -> Iterator[Engine]:
    with Engine.load(text_model, threads=1, kv_memory="8MiB") as engine:
        yield engine


@pytest.mark.parametrize("at", range(len(PLACES)))
@given(value=JUNK)
def test_prompts(engine: Engine, at: int, value: Any) -> None:
    place, names = PLACES[at]
    check(engine.prepare, {"prompt": place(value), "params": ONE}, REFUSALS, *names)


@given(value=JUNK, several=st.booleans())
def test_prompts_and_parameters_of_generate(engine: Engine, value: Any, several: bool) -> None:
    names = ("prompts", "prompt", "tokens", "messages")
    check(engine.generate, {"prompts": [value] if several else value, "params": ONE}, REFUSALS, *names)
    if value is not None:
        check(engine.generate, {"prompts": ["a"] if several else "a", "params": value}, BadField, "params")
        check(engine.stream, {"prompt": "a", "params": value}, BadField, "params")
    assert not engine.has_work


@given(value=JUNK)
def test_requests(engine: Engine, value: Any) -> None:
    check(engine.add, {"request": value}, BadField, "request")
    check(engine.add, {"request": Request("a", value)}, BadField, "params")
    assert not engine.has_work


@given(value=JUNK)
def test_logits_and_text(engine: Engine, value: Any) -> None:
    check(engine.logits, {"tokens": value}, REFUSALS, "tokens", "prompt")
    check(engine.logits, {"tokens": [1, 2], "rows": value}, BadField, "rows")
    check(engine.tokenize, {"text": value}, BadField, "prompt")
    check(engine.detokenize, {"ids": value}, BadField, "ids", "tokens")
    check(engine.detokenize, {"ids": [value]}, BadField, "tokens")


@given(value=JUNK)
def test_what_is_loaded(text_model: Path, value: Any) -> None:
    if value is not None:
        check(Engine.load, {"path_or_name": text_model, "config": value}, ConfigError, "config")
