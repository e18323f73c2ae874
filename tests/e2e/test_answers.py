"""Answers as known failures of other engines would have spoiled them, in this process and through a worker alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miro_client import Client
from miro_client.errors import MiroError, NonFinite, RequestError
from miro_cy import Engine, SamplingParams
from miro_cy.text.template import ChatTemplate

Ask = Callable[..., Any]


@pytest.fixture
def tiny(load: Callable[..., Engine], text_model: Path) -> Engine:
    return load(text_model, threads=1, kv_memory="1MiB")


@pytest.mark.parametrize(
    ("said", "text", "stop"),
    [
        ("Bob: hi\nAlice: yo", "Bob: hi", "\n"),
        ("Alic, Alic: Alice!", "Alic, Alic: Alice!", None),
        ("AliAlice: yo", "Ali", "Alice:"),
        ("AlAlAlice:", "AlAl", "Alice:"),
        ("hello Alice", "hello Alice", None),
    ],
)
def test_held_back_text_is_sent_once(speaker: Any, ask: Ask, said: str, text: str, stop: str | None) -> None:
    """`ask` compares the pieces of the stream with the whole: text that was held back comes once, and in its place."""
    ids = speaker.say(said)
    answer = ask(speaker.engine, speaker.prompt, max_tokens=len(ids), stop=["\n", "Alice:"], temperature=0.0)
    assert (answer.text, answer.stop) == (text, stop)
    # The ids are those that were generated, to the one that completed the stop: none is cut in two or left out.
    assert answer.tokens == ids[: len(answer.tokens)]
    assert speaker.engine.detokenize(answer.tokens) == text + (stop or "")


def test_ids_alone_stop_at_stop_strings_too(speaker: Any, ask: Ask) -> None:
    """A prompt of ids whose answer's ids alone are read: stop strings are looked for all the same."""
    ids = speaker.say("hello wo, hello")
    prompt = {"tokens": speaker.engine.tokenize(speaker.prompt)}
    answer = ask(speaker.engine, prompt, max_tokens=len(ids), stop=["wo,"], temperature=0.0)
    assert (answer.stop, answer.tokens) == ("wo,", ids[: len(answer.tokens)])
    assert len(answer.tokens) < len(ids)


@pytest.mark.parametrize("text", ["日本語を話します。", "한국어 🚀 naïve", "a b  c\n d", "Ω≈ç√", "é" * 30])
def test_characters_of_several_bytes_arrive_whole(speaker: Any, ask: Ask, text: str) -> None:
    ids = speaker.say(text)
    answer = ask(speaker.engine, speaker.prompt, max_tokens=len(ids), stop=["never"], temperature=0.0)
    assert (answer.text, answer.tokens) == (text, ids)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 1, "seed": 5}], ids=str)
def test_log_probabilities_of_greedy_answers(tiny: Engine, ask: Ask, sampling: dict[str, Any]) -> None:
    """Raw log-softmax, best first, the chosen token before all others, whatever made the choice greedy."""
    prompt = tiny.tokenize("hello wo")
    answer = ask(tiny, {"tokens": prompt}, max_tokens=6, logprobs=8, ignore_eos=True, **sampling)
    rows = tiny.logits(prompt + answer.tokens[:-1], rows=slice(len(prompt) - 1, None)).astype(np.float64)
    assert len(answer.logprobs) == len(rows) == 6
    for row, token, entry in zip(rows, answer.tokens, answer.logprobs, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:8]
        assert [i for i, _ in entry.top] == order
        assert token == order[0] == int(row.argmax())
        assert entry.logprob == entry.top[0][1] == pytest.approx(expected[token], abs=1e-5)
        np.testing.assert_allclose([value for _, value in entry.top], expected[order], atol=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_log_probabilities_of_the_prompt(tiny: Engine, ask: Ask, max_tokens: int) -> None:
    """The same bits in this process and over a socket, those of `logits`; nil for the token that nothing precedes."""
    prompt = tiny.tokenize("hello wo, hello world, " * 8)
    answer = ask(tiny, {"tokens": prompt}, max_tokens=max_tokens, prompt_logprobs=5, ignore_eos=True, seed=3)
    rows = tiny.logits(prompt, rows=slice(None, -1), log_softmax=True)
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(prompt) > 64
    assert len(answer.tokens) == max_tokens
    for row, token, entry in zip(rows, prompt[1:], answer.prompt_logprobs[1:], strict=True):
        order = np.argsort(-row, kind="stable")[:5]
        assert entry.logprob == row[token]
        assert entry.top == [(i, float(row[i])) for i in order.tolist()]


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 4, "temperature": 1.0, "seed": 9},
        {"n": 3, "temperature": 0.0},
        {"n": 2, "temperature": 0.9, "seed": 4, "stop": ["e", "l"]},
        {"beam_width": 4, "temperature": 0.0},
        {"beam_width": 5, "n": 2, "temperature": 0.0, "length_penalty": 0.5},
    ],
    ids=str,
)
def test_several_choices(tiny: Engine, ask: Ask, sampling: dict[str, Any]) -> None:
    """`ask` compares the first, whole and streamed; here all of them are compared with this process's."""
    prompt = {"tokens": tiny.tokenize("hello wo")}
    got = ask(tiny, prompt, max_tokens=9, logprobs=2, prompt_logprobs=1, **sampling)
    expected = tiny.generate(prompt, SamplingParams(max_tokens=9, logprobs=2, prompt_logprobs=1, **sampling))
    assert len(got.choices) == sampling.get("n", sampling.get("beam_width"))
    for one, other in zip(got.choices, expected.choices, strict=True):
        assert (one.text, list(one.tokens), one.logprobs) == (other.text, list(other.tokens), other.logprobs)
        assert (one.finish_reason, one.stop, one.score) == (other.finish_reason, other.stop, other.score)
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.usage.completion_tokens == len(one.tokens)
    assert (got.score is None) == ("beam_width" not in sampling)


class Poisoned:
    """The engine's executor, but for NaN in the last row of the sequence whose prompt has a certain length."""

    def __init__(self, engine: Engine, n_prompt: int) -> None:
        self.inner, self.n_prompt = engine._parts.core._executor, n_prompt
        self.slots: set[int] = set()
        engine._parts.core._executor = self

    def forward(self, view: Any) -> Any:
        logits = self.inner.forward(view).copy()
        at = 0
        for slot, first, n_tok, n_log in view.rows():
            at += n_log
            if first == 0:  # a sequence begins, in a slot that another may have had
                (self.slots.add if n_tok == self.n_prompt else self.slots.discard)(slot)
            if slot in self.slots and first == self.n_prompt + 1:
                logits[at - 1] = np.nan
        return logits


@pytest.mark.parametrize("through", ["engine", "worker"])
def test_a_row_that_is_no_number_ends_its_own_request_of_three(tiny: Engine, served: Any, through: str) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    expected = [tiny.generate({"tokens": prompt}, SamplingParams(**sampling)).tokens for prompt in prompts]
    Poisoned(tiny, 4)
    got: list[Any] = [None] * 3
    with Client(served(tiny) if through == "worker" else "ipc:///nobody", timeout=30) as client:

        def one(i: int) -> None:
            try:
                if through == "worker":
                    got[i] = client.complete(tokens=prompts[i], **sampling).tokens
                else:
                    got[i] = tiny.generate({"tokens": prompts[i]}, SamplingParams(**sampling)).tokens
            except MiroError as error:
                got[i] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert isinstance(got[1], NonFinite)
    assert "position 6" in str(got[1])
    assert (got[0], got[2]) == (expected[0], expected[2])


HOSTILE_TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for c in ''.__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
]


@pytest.mark.parametrize("source", HOSTILE_TEMPLATES)
def test_promise_a_model_file_is_data_its_template_runs_nothing(tiny: Engine, ask: Ask, source: str) -> None:
    """A chat is refused; a text, and the next request, are answered."""
    tiny.tokenizer._template = ChatTemplate(source, {})
    with pytest.raises(RequestError) as caught:
        ask(tiny, {"messages": [{"role": "user", "content": "hi"}]}, max_tokens=1)
    assert caught.value.code in ("unsupported", "bad_field")
    assert ask(tiny, "he", max_tokens=1, temperature=0.0).finish_reason == "length"


@pytest.mark.parametrize("field", ["template", "chat_template", "tools", "documents"])
def test_promise_a_model_file_is_data_and_clients_send_no_template(tiny: Engine, served: Any, field: str) -> None:
    with Client(served(tiny), timeout=30) as client, pytest.raises(RequestError) as caught:
        client.complete("he", max_tokens=1, **{field: "{{ 1 }}"})
    assert (caught.value.code, caught.value.field) == ("bad_field", field)


def test_an_unknown_pre_tokenizer_serves_ids_and_refuses_text(
    load: Callable[..., Engine], text_model: Path, tmp_path: Path, ask: Ask
) -> None:
    """A guess would degrade every answer unseen; the weights are as good as ever."""
    path = tmp_path / "other.gguf"
    path.write_bytes(text_model.read_bytes().replace(b"smollm", b"chatgl"))
    engine = load(path, threads=1)
    for prompt in ("hello", {"messages": [{"role": "user", "content": "hello"}]}):
        with pytest.raises(RequestError, match="gpt2/chatgl") as caught:
            ask(engine, prompt, max_tokens=1)
        assert caught.value.code == "unsupported"
    with load(text_model, threads=1) as known:
        expected = known.generate({"tokens": [1, 2]}, SamplingParams(temperature=0, max_tokens=3)).tokens
    assert ask(engine, {"tokens": [1, 2]}, max_tokens=3, temperature=0.0).tokens == expected
