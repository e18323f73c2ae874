"""What the engine refuses, up front, by name; a refused request leaves nothing behind."""

import os
import tracemalloc

import numpy as np
import pytest

from miro_cy import SamplingParams
from miro_cy.errors import BadField, ContextOverflow, EngineClosed, MiroError, Unsupported
from miro_cy.requests import Request

ONE = SamplingParams(temperature=0, max_tokens=1)

BAD_PROMPTS = [
    (None, "prompts"),
    (3, "prompts"),
    ({}, "prompt"),
    ({"text": "a"}, "prompt"),
    ({"tokens": [1], "messages": []}, "prompt"),
    ([None], "prompt"),
    ([1, 2, 3], "prompt"),
    ([[1, 2, 3]], "prompt"),
    (b"ab", "prompts"),
    ({"tokens": None}, "tokens"),
    ({"tokens": 5}, "tokens"),
    ({"tokens": "12"}, "tokens"),
    ({"tokens": b"12"}, "tokens"),
    ({"tokens": {"1": 2}}, "tokens"),
    ({"tokens": ["1"]}, "tokens"),
    ({"tokens": [1.0]}, "tokens"),
    ({"tokens": [True]}, "tokens"),
    ({"tokens": [None]}, "tokens"),
    ({"tokens": [[1, 2]]}, "tokens"),
    ({"tokens": [[1], [2, 3]]}, "tokens"),
    ({"tokens": np.array(3)}, "tokens"),
    ({"tokens": np.zeros((2, 2), np.int32)}, "tokens"),
    ({"tokens": np.array([1.5])}, "tokens"),
    ({"tokens": [-1]}, "tokens"),
    ({"tokens": [0, 320]}, "tokens"),
    ({"tokens": [2**31]}, "tokens"),
    ({"tokens": [2**70]}, "tokens"),
    ({"tokens": np.array([2**32 + 1])}, "tokens"),
    ({"tokens": []}, "prompt"),
]


@pytest.mark.parametrize("at", range(len(BAD_PROMPTS)))
def test_bad_prompts(llama, at):
    prompt, field = BAD_PROMPTS[at]
    with pytest.raises(BadField) as caught:
        llama.generate(prompt, ONE)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300
    with pytest.raises(BadField):
        llama.stream(prompt, ONE)
    with pytest.raises(BadField):
        llama.add(Request(prompt, ONE))
    assert not llama.has_work


@pytest.mark.parametrize("tokens", [None, 5, "12", [1.5], [[1], [2, 3]], [320], [-1], np.array([0, 400])], ids=str)
def test_bad_ids_to_logits(llama, tokens):
    with pytest.raises(BadField) as caught:
        llama.logits(tokens)
    assert caught.value.field == "tokens"


@pytest.mark.parametrize("rows", [1, "a", slice(None, None, 0), slice("a", "b"), [0, 1]], ids=str)
def test_bad_rows_of_logits(llama, rows):
    with pytest.raises(BadField) as caught:
        llama.logits([1, 2], rows=rows)
    assert caught.value.field == "rows"


@pytest.mark.parametrize("params", [3, "greedy", {"temperature": 0}, [ONE]], ids=str)
def test_bad_parameters_for_one_prompt(llama, params):
    with pytest.raises(BadField) as caught:
        llama.generate({"tokens": [1]}, params)
    assert caught.value.field == "params"
    with pytest.raises(BadField):
        llama.stream({"tokens": [1]}, params)


@pytest.mark.parametrize("params", [3, {"temperature": 0}, [ONE], [ONE, None], [ONE, "x"], [ONE] * 3], ids=str)
def test_bad_parameters_for_two_prompts(llama, params):
    with pytest.raises(BadField) as caught:
        llama.generate([{"tokens": [1]}] * 2, params)
    assert caught.value.field == "params"


def test_one_bad_prompt_of_many_starts_none(llama):
    before = llama.stats()["steps"]
    with pytest.raises(BadField):
        llama.generate([{"tokens": [1]}, {"tokens": [999]}], ONE)
    assert llama.stats()["steps"] == before


def test_stop_token_ids_lie_in_the_vocabulary(llama):
    llama.generate({"tokens": [1]}, SamplingParams(max_tokens=1, stop_token_ids=[319]))
    with pytest.raises(BadField) as caught:
        llama.generate({"tokens": [1]}, SamplingParams(max_tokens=1, stop_token_ids=[320]))
    assert caught.value.field == "stop_token_ids"


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.generate("hello", ONE),
        lambda e: e.stream("hello", ONE),
        lambda e: e.generate({"messages": [{"role": "user", "content": "hello"}]}, ONE),
        lambda e: e.generate({"tokens": [1]}, SamplingParams(max_tokens=1, stop="a")),
        lambda e: e.tokenize("hello"),
        lambda e: e.detokenize([1]),
    ],
)
def test_text_to_a_model_without_a_tokenizer_is_refused_with_its_name(llama, call):
    with pytest.raises(Unsupported, match="none"):
        call(llama)
    result = llama.generate({"tokens": [1]}, ONE)
    assert (result.text, len(result.tokens)) == ("", 1)


def test_messages_to_a_model_with_a_template(load, text_model):
    engine = load(text_model, threads=1)
    for messages in ([], [{}], "hello", [{"role": "user"}], [{"role": 1, "content": "a"}], None):
        with pytest.raises(BadField):
            engine.generate({"messages": messages}, ONE)
    with pytest.raises(BadField):
        engine.generate("lone \ud800 surrogate", ONE)


# --- too long ------------------------------------------------------------------------------------------------------


def test_context_limits(llama):
    context = llama.context
    llama.generate({"tokens": [1] * (context - 1)}, ONE)
    for length, max_tokens, field in (
        (context + 1, 0, "prompt"),
        (context, 1, "max_tokens"),
        (1, context, "max_tokens"),
    ):
        with pytest.raises(ContextOverflow, match=str(context)) as caught:
            llama.generate({"tokens": [1] * length}, SamplingParams(max_tokens=max_tokens))
        assert caught.value.field == field


def test_a_full_prompt_leaves_nothing_to_generate(llama):
    prompt = {"tokens": [1] * llama.context}
    assert llama.generate(prompt, SamplingParams(max_tokens=0)).tokens == []
    with pytest.raises(ContextOverflow, match="no room") as caught:
        llama.generate(prompt, SamplingParams())
    assert caught.value.field == "prompt"


def test_logits_of_a_prompt_too_long(llama):
    assert llama.logits([1] * llama.context, rows=slice(-1, None)).shape == (1, llama.vocab_size)
    with pytest.raises(ContextOverflow):
        llama.logits([1] * (llama.context + 1))
    tracemalloc.start()
    try:
        with pytest.raises(ContextOverflow):  # before room for so many rows of logits is made, 12.8 GB
            llama.logits(np.broadcast_to(np.int32(1), 10**7))
        assert tracemalloc.get_traced_memory()[1] < 10**9
    finally:
        tracemalloc.stop()


def test_a_pool_smaller_than_the_context_limits_a_sequence(load, golden):
    block = load(golden("llama"), threads=1, block_size=16)._parts.spec.kv_bytes_per_token("fp32") * 16
    engine = load(golden("llama"), threads=1, block_size=16, kv_memory=4 * block)
    assert engine.context == 64
    assert len(engine.generate({"tokens": [1] * 60}, SamplingParams(temperature=0)).tokens) == 4
    with pytest.raises(ContextOverflow):
        engine.generate({"tokens": [1] * 60}, SamplingParams(max_tokens=5))
    with pytest.raises(ContextOverflow):
        engine.add(Request({"tokens": [1] * 100}, ONE))


# --- closed --------------------------------------------------------------------------------------------------------


def use_everything(engine):
    return [
        lambda: engine.generate({"tokens": [1]}, ONE),
        lambda: engine.generate([], ONE),
        lambda: engine.stream({"tokens": [1]}, ONE),
        lambda: engine.logits([1]),
        lambda: engine.add(Request({"tokens": [1]}, ONE)),
        lambda: engine.abort(1),
        engine.step,
    ]


def test_a_closed_engine_refuses(load, golden):
    engine = load(golden("llama"), threads=1)
    started = engine.stream({"tokens": [1]}, ONE)
    engine.generate({"tokens": [1]}, ONE)
    engine.close()
    engine.close()
    for call in use_everything(engine):
        with pytest.raises(EngineClosed):
            call()
    with pytest.raises(EngineClosed):
        next(started)


def test_leaving_the_with_block_closes(load, golden):
    with load(golden("llama"), threads=1) as engine:
        engine.generate({"tokens": [1]}, ONE)
    with pytest.raises(EngineClosed):
        engine.generate({"tokens": [1]}, ONE)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_use_after_fork_raises(llama):
    llama.generate({"tokens": [1]}, ONE)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in use_everything(llama):
            try:
                call()
            except EngineClosed as error:
                refused += "fork" in str(error)
            except BaseException:
                pass
        llama.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(use_everything(llama))
    assert len(llama.generate({"tokens": [1]}, ONE).tokens) == 1


def test_errors_have_one_root():
    assert issubclass(BadField, MiroError)
    assert issubclass(BadField, ValueError)
