"""What a user may ask by mistake or on purpose at the edges, in this process and through a worker alike."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miro_client import Client
from miro_client.errors import BadField, ContextOverflow, Unsupported
from miro_client.results import Usage
from miro_cy import Engine
from miro_cy.text.template import ChatTemplate

Ask = Callable[..., Any]
BAD = runpy.run_path(str(Path(__file__).parents[1] / "bad_sampling.py"))["BAD"]
GREEDY = {"temperature": 0.0}
REPLACED = "\ufffd"


@pytest.fixture
def tiny(load: Callable[..., Engine], text_model: Path) -> Engine:
    """A context of 256 tokens in a pool of more."""
    return load(text_model, threads=1, kv_memory="1MiB")


def byte(speaker: Any, value: int) -> int:
    """The token that stands for one byte."""
    tokenizer = speaker.engine.tokenizer
    return next(
        i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i, skip_special=False) == bytes([value])
    )


# --- prompts that are too long ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 300,
        "x" * 1_000_000,
        {"tokens": [5] * 257},
        {"messages": [{"role": "user", "content": "x" * 300}]},
    ],
    ids=["text", "much text", "tokens", "messages"],
)
def test_a_prompt_longer_than_the_context(tiny: Engine, ask: Ask, prompt: Any) -> None:
    """Refused with both numbers, as vLLM and llama.cpp's server do; cutting it in silence answers another question."""
    for max_tokens in (None, 0, 1, 10_000):
        with pytest.raises(ContextOverflow, match="256") as caught:
            ask(tiny, prompt, max_tokens=max_tokens)
        assert caught.value.field == "prompt"
    assert ask(tiny, "x", max_tokens=2, **GREEDY).finish_reason == "length"


def test_a_prompt_and_max_tokens_that_exceed_the_context_together(tiny: Engine, ask: Ask) -> None:
    """max_tokens is what can be lowered, so it is what is named; left out, the answer takes what room there is."""
    with pytest.raises(ContextOverflow, match=r"\(200\) and max_tokens \(57\) exceed the context of 256") as caught:
        ask(tiny, {"tokens": [5] * 200}, max_tokens=57)
    assert caught.value.field == "max_tokens"
    assert len(ask(tiny, {"tokens": [5] * 200}, max_tokens=56, ignore_eos=True, **GREEDY).tokens) == 56
    assert len(ask(tiny, {"tokens": [5] * 200}, ignore_eos=True, **GREEDY).tokens) == 56


def test_a_prompt_that_fills_the_context(tiny: Engine, ask: Ask) -> None:
    with pytest.raises(ContextOverflow, match="leaves no room") as caught:
        ask(tiny, {"tokens": [5] * 256})
    assert caught.value.field == "prompt"
    assert ask(tiny, {"tokens": [5] * 256}, max_tokens=0).tokens == []


def test_a_context_longer_than_the_pool(load: Callable[..., Engine], text_model: Path, served: Any, ask: Ask) -> None:
    """The context that is told, and kept to, is what fits the pool: no request waits for room that cannot come.

    vLLM refuses to start there; a smaller context is the more useful answer as long as it is told.
    """
    block = load(text_model, threads=1)._parts.spec.kv_bytes_per_token("fp32") * 16
    engine = load(text_model, threads=1, block_size=16, kv_memory=4 * block)
    assert engine.context == 64
    with Client(served(engine), timeout=30) as client:
        assert client.hello().context == 64
    with pytest.raises(ContextOverflow, match="64"):
        ask(engine, {"tokens": [5] * 65}, max_tokens=1)
    with pytest.raises(ContextOverflow, match="64"):
        ask(engine, {"tokens": [5] * 60}, max_tokens=5)
    answer = ask(engine, {"tokens": [5] * 60}, ignore_eos=True, **GREEDY)
    assert (len(answer.tokens), answer.finish_reason) == (4, "length")


# --- prompts with nothing in them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [("", {"prompt"}), ({"tokens": []}, {"prompt", "tokens"}), ({"messages": []}, {"messages"})],
    ids=["text", "tokens", "messages"],
)
def test_a_prompt_of_no_tokens(tiny: Engine, ask: Ask, prompt: Any, fields: set[str]) -> None:
    """There is no token to go on from: refused, as vLLM does. Inventing one would answer what nobody asked."""
    for max_tokens in (None, 0, 5):
        with pytest.raises(BadField) as caught:
            ask(tiny, prompt, max_tokens=max_tokens)
        assert caught.value.field in fields


def test_an_empty_text_to_a_model_that_begins_texts_itself(
    load: Callable[..., Engine], text_model: Path, ask: Ask
) -> None:
    """Where the model's file puts BOS before texts, the empty one is the prompt [BOS], as for llama.cpp and vLLM."""
    engine = load(text_model, threads=1)
    engine.tokenizer.add_bos = True
    answer = ask(engine, "", max_tokens=3, ignore_eos=True, **GREEDY)
    assert answer.usage == Usage(prompt_tokens=1, completion_tokens=3)
    assert (
        answer.tokens
        == ask(engine, {"tokens": [engine.tokenizer.bos_id]}, max_tokens=3, ignore_eos=True, **GREEDY).tokens
    )


def test_an_empty_message_is_a_prompt(tiny: Engine, ask: Ask) -> None:
    """The template writes something around it."""
    answer = ask(tiny, {"messages": [{"role": "user", "content": ""}]}, max_tokens=2, ignore_eos=True, **GREEDY)
    assert (answer.usage.prompt_tokens > 4, len(answer.tokens)) == (True, 2)


@pytest.mark.parametrize("text", ["<|im_start|>", "<|im_end|>", "<s>", "<|im_start|><|im_end|><s><s>"])
def test_a_prompt_of_special_tokens_only(tiny: Engine, ask: Ask, text: str) -> None:
    """A prompt like any other: an end token in it ends nothing, and it has the ids that its text names."""
    answer = ask(tiny, text, max_tokens=3, ignore_eos=True, **GREEDY)
    ids = tiny.tokenizer.encode(text)
    assert all(i >= tiny.vocab_size - 3 for i in ids)
    assert answer.usage == Usage(prompt_tokens=text.count("<"), completion_tokens=3)
    assert answer.tokens == ask(tiny, {"tokens": ids}, max_tokens=3, ignore_eos=True, **GREEDY).tokens


# --- answers that hardly begin ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["he", {"tokens": [5]}, {"messages": [{"role": "user", "content": "he"}]}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_max_tokens_zero(tiny: Engine, ask: Ask, prompt: Any, logprobs: int | None) -> None:
    """The prompt is checked and counted, nothing is generated: what llama.cpp does (vLLM refuses it).

    It is how to count a prompt's tokens, and what a request for its log-probabilities alone will look like.
    """
    answer = ask(tiny, prompt, max_tokens=0, logprobs=logprobs, stop=["x"])
    assert (answer.text, answer.tokens, answer.finish_reason, answer.stop) == ("", [], "length", None)
    assert answer.usage.prompt_tokens > 0
    assert not answer.logprobs


def test_max_tokens_one(speaker: Any, ask: Ask) -> None:
    first, *_ = speaker.say("hello wo")
    answer = ask(speaker.engine, speaker.prompt, max_tokens=1, logprobs=1, **GREEDY)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("hello", [first], "length")
    assert len(answer.logprobs) == 1
    assert answer.usage == Usage(prompt_tokens=speaker.n_prompt, completion_tokens=1)


def test_max_tokens_one_and_the_end_token(speaker: Any, ask: Ask) -> None:
    """The model ended the text itself: that is the reason, not the length. As for vLLM."""
    speaker.say("<|im_end|>hello")
    answer = ask(speaker.engine, speaker.prompt, max_tokens=1, **GREEDY)
    assert (answer.text, answer.finish_reason, answer.stop) == ("", "stop", None)


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("stops", [["hello"], ["h"], ["zzz", "hel"], ["hello wo", "ello"]])
def test_a_stop_string_in_the_first_token(speaker: Any, ask: Ask, stops: list[str], max_tokens: int) -> None:
    """The text ends before it, the token that held it is counted and reported. As for vLLM; llama.cpp too."""
    first, *_ = speaker.say("hello wo, hello")
    answer = ask(speaker.engine, speaker.prompt, max_tokens=max_tokens, stop=stops, **GREEDY)
    stop = next(stop for stop in stops if stop in "hello")
    assert (answer.text, answer.finish_reason, answer.stop) == ("hello"[: "hello".index(stop)], "stop", stop)
    assert answer.tokens == [first]
    assert answer.usage.completion_tokens == 1


def test_a_stop_string_that_only_began_when_the_length_ended_it(speaker: Any, ask: Ask) -> None:
    """Held back in case it went on; nothing of it is lost or sent twice."""
    speaker.say("hello wo")
    answer = ask(speaker.engine, speaker.prompt, max_tokens=1, stop=["hello wo"], **GREEDY)
    assert (answer.text, answer.finish_reason, answer.stop) == ("hello", "length", None)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_answer_of_special_tokens_only(speaker: Any, ask: Ask, ignore_eos: bool) -> None:
    """They are counted and reported as ids, and stand for no text, as with skip_special_tokens elsewhere."""
    said = speaker.say("<|im_start|><s><|im_start|><|im_end|>")
    answer = ask(speaker.engine, speaker.prompt, max_tokens=4, ignore_eos=ignore_eos, stop=["<s>"], **GREEDY)
    assert (answer.text, answer.tokens, answer.stop) == ("", said, None)
    assert answer.finish_reason == ("length" if ignore_eos else "stop")
    assert answer.usage.completion_tokens == 4


# --- bytes that are no text ---------------------------------------------------------------------------------------

ROCKET = "🚀".encode()
#: bytes of the answer, one token each -> the text; every piece of a broken character is one U+FFFD (as browsers and
#: Python's decoder have it), and what comes after it is untouched.
BROKEN = [
    (b"a" + ROCKET[:1], "a" + REPLACED),
    (b"a" + ROCKET[:3], "a" + REPLACED),
    (ROCKET[:2], REPLACED),
    (b"a" + ROCKET[:3] + b"b", "a" + REPLACED + "b"),
    (ROCKET[:2] + ROCKET, REPLACED + "🚀"),
    (b"\x80\x80a", REPLACED * 2 + "a"),
    (b"a\xffb\xfe", "a" + REPLACED + "b" + REPLACED),
    (b"\xed\xa0\x80!", REPLACED * 3 + "!"),  # half of a surrogate pair
    (b"\xc0\xafz", REPLACED * 2 + "z"),  # a slash, written too long
    (ROCKET + b"\xe6\x9d", "🚀" + REPLACED),
]


@pytest.mark.parametrize(("data", "text"), BROKEN, ids=[data.hex() for data, _ in BROKEN])
@pytest.mark.parametrize("end", ["length", "eos", "stop id"])
def test_bytes_that_are_no_utf8(speaker: Any, ask: Ask, data: bytes, text: str, end: str) -> None:
    """The text is that of the ids decoded at once: what cannot be read shows as U+FFFD, at the end too.

    Leaving an unfinished character out, as llama.cpp does, hides that max_tokens cut an answer in a character.
    """
    engine = speaker.engine
    tokens = [byte(speaker, value) for value in data]
    last = {"length": [], "eos": [speaker.token("<|im_end|>")], "stop id": [speaker.token("?")]}[end]
    said = speaker.say(tokens + last)
    params: dict[str, Any] = {"stop_token_ids": last} if end == "stop id" else {}
    answer = ask(engine, speaker.prompt, max_tokens=len(said), stop=["never"], **params, **GREEDY)
    assert answer.text == text == engine.detokenize(tokens)
    assert answer.tokens == said
    assert answer.finish_reason == ("length" if end == "length" else "stop")


def test_a_stop_string_after_broken_bytes(speaker: Any, ask: Ask) -> None:
    said = speaker.say([byte(speaker, value) for value in b"a" + ROCKET[:3] + b"STOP and more"])
    answer = ask(speaker.engine, speaker.prompt, max_tokens=len(said), stop=["STOP"], **GREEDY)
    assert (answer.text, answer.stop, len(answer.tokens)) == ("a" + REPLACED, "STOP", 8)


def test_replacement_characters_that_the_model_says(speaker: Any, ask: Ask) -> None:
    """U+FFFD is a character like any other: a decoder that takes it for an unfinished one would hold it back."""
    said = speaker.say("a" + REPLACED + "b" + REPLACED)
    answer = ask(speaker.engine, speaker.prompt, max_tokens=len(said), **GREEDY)
    assert answer.text == "a" + REPLACED + "b" + REPLACED


def test_no_piece_of_a_stream_ends_in_half_a_character(speaker: Any, served: Any) -> None:
    text = "日本語 🚀 naïve"
    said = speaker.say([byte(speaker, value) for value in text.encode()])
    with Client(served(speaker.engine), timeout=30) as client:
        pieces = [chunk.text for chunk in client.generate(speaker.prompt, max_tokens=len(said), **GREEDY)]
    assert "".join(pieces) == text
    assert REPLACED not in "".join(pieces)


# --- fields that are wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD)
def test_bad_sampling_parameters_are_named(tiny: Engine, ask: Ask, request: pytest.FixtureRequest, name: str) -> None:
    sent = 0
    for value in BAD[name]:
        if request.node.callspec.params["ask"] == "worker":
            try:
                msgspec.msgpack.encode(value)
            except (TypeError, OverflowError, ValueError):
                continue
        sent += 1
        with pytest.raises(BadField, match=name) as caught:
            ask(tiny, "he", **{name: value})
        assert caught.value.field == name
    assert sent > 3


@pytest.mark.parametrize("token", [-1, 265, 2**31 - 1])
def test_token_ids_outside_the_vocabulary(tiny: Engine, ask: Ask, token: int) -> None:
    with pytest.raises(BadField, match=str(token)) as caught:
        ask(tiny, {"tokens": [1, token]}, max_tokens=1)
    assert caught.value.field == "tokens"


def test_stop_token_ids_outside_the_vocabulary(tiny: Engine, ask: Ask) -> None:
    with pytest.raises(BadField, match="265") as caught:
        ask(tiny, "he", max_tokens=1, stop_token_ids=[265])
    assert caught.value.field == "stop_token_ids"


def test_text_and_stops_that_a_model_without_a_tokenizer_cannot_have(
    load: Callable[..., Engine], golden: Callable[[str], Path], ask: Ask
) -> None:
    engine = load(golden("llama"), threads=1)
    for prompt, sampling in (
        ("hello", {}),
        ({"messages": [{"role": "user", "content": "hello"}]}, {}),
        ({"tokens": [1]}, {"stop": ["a"]}),
    ):
        with pytest.raises(Unsupported, match="none"):
            ask(engine, prompt, max_tokens=1, **sampling)
    answer = ask(engine, {"tokens": [1]}, max_tokens=2, **GREEDY)
    assert (answer.text, len(answer.tokens)) == ("", 2)


def test_tool_calls_reach_the_template(tiny: Engine, ask: Ask) -> None:
    tiny.tokenizer._template = ChatTemplate(
        "{% for m in messages %}{{ m.tool_calls | tojson }}{{ m.name }}{% endfor %}", {}
    )
    messages = [{"role": "assistant", "tool_calls": [{"a": [1, None, True]}], "name": "Ann"}]
    answer = ask(tiny, {"messages": messages}, max_tokens=1, **GREEDY)
    assert answer.usage.prompt_tokens == len(tiny.tokenizer.encode('[{"a": [1, null, true]}]Ann'))


def test_a_deadline_ends_an_answer_with_what_there_is(tiny: Engine, served: Any) -> None:
    """The worker's deadlines, over a socket: whole and streamed, and they say so instead of failing."""
    with Client(served(tiny), timeout=30) as client:
        whole = client.complete("hello", max_tokens=200, ignore_eos=True, deadline_ms=1, queue_ms=60_000)
        assert whole.finish_reason == "deadline"
        assert len(whole.tokens) < 200
        stream = client.generate("hello", max_tokens=200, ignore_eos=True, queue_ms=1, deadline_ms=60_000)
        assert "".join(chunk.text for chunk in stream) == stream.result.text
        assert stream.result.finish_reason in ("deadline", "length"), "it may have begun within a millisecond"
        calm = client.complete("hello", max_tokens=5, ignore_eos=True, deadline_ms=60_000, priority=-100)
        assert (calm.finish_reason, len(calm.tokens)) == ("length", 5)
        for bad in ({"deadline_ms": 0}, {"queue_ms": -1}, {"priority": 101}, {"deadline_ms": "soon"}):
            with pytest.raises(BadField) as caught:
                client.complete("hello", **bad)
            assert caught.value.field == next(iter(bad))
