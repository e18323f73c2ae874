"""Real vocabularies: known ids, and every text that goes in comes out, whole or streamed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy.text import Tokenizer, load_tokenizer

VOCABULARIES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2")
SENTENCEPIECE = ("llama-spm", "phi-3")
# Texts of all kinds: any character, and runs of what tokenizers treat in special ways.
TEXT = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=8)
    | st.sampled_from(
        [" ", "  ", "    ", "\n", "\r\n", "\t", "\u2029", "\xa0", "1", "2024", "'LL", "'s", "Hello", "東京"]
    ),
    max_size=12,
).map("".join)
#: (beginning of sequence, a control token) of each.
NAMES = {
    "gpt-2": ("<|endoftext|>", "<|endoftext|>"),
    "llama-bpe": ("<|begin_of_text|>", "<|eot_id|>"),
    "llama-spm": ("<s>", "</s>"),
    "phi-3": ("<s>", "<|endoftext|>"),
    "qwen2": ("<|endoftext|>", "<|im_end|>"),
}


@pytest.fixture(scope="module", params=VOCABULARIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def real(name: str, reference_data: Path) -> Tokenizer:
    return load_tokenizer(reference_data / "vocab" / f"ggml-vocab-{name}.gguf")


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool) -> str:
    stream = tokenizer.stream(skip_special=skip_special)
    return "".join(stream.push(i)[0] for i in ids) + stream.finish()


def test_known_ids(name: str, real: Tokenizer, reference_data: Path) -> None:
    base = reference_data / "vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{base}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{base}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = [int(part) for part in line.split()]
        assert real.encode(text, add_special=False) == ids, text
        assert real.decode(ids) == text == streamed(real, ids, skip_special=True)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXT, parse_special=st.booleans())
def test_every_character_survives(real: Tokenizer, text: str, parse_special: bool) -> None:
    ids = real.encode(text, add_special=False, parse_special=parse_special)
    assert real.decode(ids, skip_special=False) == text
    assert streamed(real, ids, skip_special=False) == text


@given(data=st.data(), skip_special=st.booleans())
def test_any_ids_stream_as_they_decode(real: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=30))
    assert streamed(real, ids, skip_special=skip_special) == real.decode(ids, skip_special=skip_special)


def test_special_tokens_between_texts(name: str, real: Tokenizer) -> None:
    """A special token is one id, and the texts around it keep their spaces."""
    bos, control = NAMES[name]
    for before, after in itertools.product(("", "a", " a", "a ", " "), repeat=2):
        text = before + control + after
        ids = real.encode(text, add_special=False)
        (special,) = real.encode(control, add_special=False)
        assert ids.count(special) == 1
        assert real.decode(ids, skip_special=False) == text
        assert special not in real.encode(text, add_special=False, parse_special=False)
    (first,) = real.encode(bos, add_special=False)
    assert real.encode(bos + "a")[0] == first
    assert real.encode(bos + "a").count(first) == 1
    assert real.encode("a").count(first) == int(real.add_bos)


def test_bos_and_eos(name: str, real: Tokenizer) -> None:
    expected = {
        "gpt-2": (False, {50256}),
        "llama-bpe": (True, {128001, 128009}),
        "llama-spm": (True, {2}),
        "phi-3": (True, {32000, 32007}),
        "qwen2": (False, {151643, 151645}),
    }
    assert (real.add_bos, real.eos_ids) == expected[name]


def test_no_space_after_special_tokens_in_sentencepiece(reference_data: Path) -> None:
    """As transformers does it (legacy=false); known ids of Llama 2's vocabulary."""
    spm = load_tokenizer(reference_data / "vocab" / "ggml-vocab-llama-spm.gguf")
    assert spm.encode("<s>Hello</s> Hello  Hello") == [1, 10994, 2, 15043, 29871, 15043]
    assert spm.encode("Hello") == [1, 15043]
    phi = load_tokenizer(reference_data / "vocab" / "ggml-vocab-phi-3.gguf")
    assert phi.encode("<|user|>\nHello<|end|>\n<|assistant|>\n") == [1, 32010, 10994, 32007, 32001]
