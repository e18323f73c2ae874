"""Text to ids and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.errors import BadField, ModelFormatError, ModelNotFound, Unsupported
from miro_cy.formats.gguf import GGUFFile
from miro_cy.text import Tokenizer, load_tokenizer
from miro_cy.text.bytelevel import BYTES, piece_bytes

DATA = Path(__file__).parents[1] / "data"
Maker = Callable[..., Tokenizer]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def vocabulary_of(make: Maker) -> dict[str, int]:
    tokenizer = make()
    return {tokenizer.decode([i], skip_special=False): i for i in range(tokenizer.vocab_size)}


def test_alphabet_is_a_bijection() -> None:
    assert sorted(BYTES.values()) == list(range(256))
    assert len(BYTES) == 256
    # The two marks everyone knows from byte-level vocabularies.
    assert (BYTES["Ġ"], BYTES["Ċ"]) == (0x20, 0x0A)
    assert piece_bytes("ĠwoA") == b" woA"
    assert piece_bytes("A東") == b"A" + "東".encode()


def test_merges_are_applied(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("hello world")]
    assert pieces == [b"hello", b" wo", b"r", b"l", b"d"]


def test_smollm_splits_digits_and_gpt2_does_not(make_tokenizer: Maker) -> None:
    tokens = [*BYTES, "12", "<s>"]
    common = {"tokens": tokens, "merges": ["1 2"], "token_type": None, "bos_token_id": None}
    smollm = make_tokenizer(pre="smollm", **common)
    gpt2 = make_tokenizer(pre="gpt-2", **common)
    assert [smollm.token_bytes(i) for i in smollm.encode("12")] == [b"1", b"2"]
    assert [gpt2.token_bytes(i) for i in gpt2.encode("12")] == [b"12"]
    assert (smollm.kind, gpt2.kind) == ("gpt2/smollm", "gpt2/gpt-2")


@given(TEXT)
def test_every_text_survives(tokenizer: Tokenizer, text: str) -> None:
    for parse_special in (True, False):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=parse_special), skip_special=False) == text


def test_special_tokens_in_text(tokenizer: Tokenizer) -> None:
    text = "hello<|im_end|><tool>"
    parsed = tokenizer.encode(text)
    assert len(parsed) == 3
    assert tokenizer.decode(parsed) == "hello<tool>"
    assert tokenizer.decode(parsed, skip_special=False) == text
    spelled = tokenizer.encode(text, parse_special=False)
    assert parsed[1] not in spelled
    assert spelled[-1] == parsed[-1]  # user-defined: always one token
    assert tokenizer.decode(spelled) == text


def test_newer_pre_tokenizers_split_digits_and_words(make_tokenizer: Maker) -> None:
    tokens = [*BYTES, "12", "12ab", "'S", ".a", "<s>"]
    common = {
        "tokens": tokens, "merges": ["1 2", "' S", ". a"], "token_type": None, "bos_token_id": tokens.index("<s>"),
    }  # fmt: skip

    def pieces(pre: str, text: str) -> list[bytes]:
        tokenizer = make_tokenizer(pre=pre, **common)
        return [tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special=False)]

    assert pieces("llama-bpe", "12") == [b"12"]
    assert pieces("llama-bpe", "1212") == [b"12", b"1", b"2"]  # by threes
    assert pieces("qwen2", "12") == [b"1", b"2"]
    assert pieces("qwen2", "it'S.a") == pieces("llama-bpe", "it'S.a") == [b"i", b"t", b"'S", b".a"]
    # A file that does not say whether texts begin with BOS means what its tokenizer always did.
    assert make_tokenizer(pre="llama-bpe", **common).add_bos
    assert not make_tokenizer(pre="llama-bpe", add_bos_token=False, **common).add_bos
    assert not make_tokenizer(pre="qwen2", **common).add_bos


def test_longest_special_token_wins(make_tokenizer: Maker) -> None:
    tokens = [*BYTES, "<a>", "<a><b>"]
    tokenizer = make_tokenizer(
        tokens=tokens, merges=[], token_type=[1] * 256 + [3, 3], bos_token_id=None, template=None
    )
    assert tokenizer.encode("<a><b><a>") == [257, 256]


def test_an_entry_that_is_there_twice_has_its_bytes_at_both_ids(make_tokenizer: Maker) -> None:
    tokens = [*BYTES, "he", "he", "", "", "\u0120"]
    tokenizer = make_tokenizer(tokens=tokens, merges=["h e"], token_type=None, bos_token_id=None, template=None)
    assert tokenizer.encode("he ") == [256, tokens.index("\u0120")]
    assert [tokenizer.token_bytes(i) for i in range(256, len(tokens))] == [b"he", b"he", b"", b"", b" "]


def test_bos_only_when_asked_for_and_never_twice(make_tokenizer: Maker) -> None:
    plain, adding = make_tokenizer(), make_tokenizer(add_bos_token=True)
    assert adding.bos_id is not None
    assert plain.bos_id not in plain.encode("hello")
    for text in ("hello", "<s>hello", ""):
        assert adding.encode(text).count(adding.bos_id) == 1
        assert adding.encode(text)[0] == adding.bos_id
        assert adding.encode(text, add_special=False).count(adding.bos_id) == text.count("<s>")
    assert not make_tokenizer(add_bos_token=True, bos_token_id=None).add_bos


def test_eos_is_the_union_of_all_sources(make_tokenizer: Maker) -> None:
    ids = vocabulary_of(make_tokenizer)
    end, start, tool = ids["<|im_end|>"], ids["<|im_start|>"], ids["<tool>"]
    assert make_tokenizer().eos_ids == {end}
    assert make_tokenizer(eos_token_id=5, eot_token_id=start, eom_token_id=tool).eos_ids == {5, start, tool, end}
    # A word that merely looks like one is not: the type decides.
    assert make_tokenizer(token_type=None).eos_ids == frozenset()


def test_absent_special_ids(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer(bos_token_id=2**32 - 1, eos_token_id=("i32", -1))
    assert tokenizer.bos_id is None
    with pytest.raises(ModelFormatError, match="eos_token_id' is 5000; it must be below"):
        make_tokenizer(eos_token_id=5000)


def test_refusals_of_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadField, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(BadField, match="must be a string"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]


def test_text_the_vocabulary_lacks_is_refused_not_dropped(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer(without=b"\x04\xf1")
    assert tokenizer.decode(tokenizer.encode("hello é")) == "hello é"
    with pytest.raises(BadField, match=r"U\+0004"):
        tokenizer.encode("a\x04b")
    with pytest.raises(BadField, match=r"U\+50000"):
        tokenizer.encode("\U00050000")


def test_ids_out_of_range(tokenizer: Tokenizer) -> None:
    for bad in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(BadField, match=f"{bad} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([0, bad])
    for wrong in (1.5, "1", None):
        with pytest.raises(BadField, match="must be an integer"):
            tokenizer.token_bytes(wrong)  # type: ignore[arg-type]
    assert tokenizer.decode(np.array([ord("A") - 0x21], np.int32)) == "A"


def test_unused_entries_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1, skip_special=False) == b""


def test_invalid_utf8_is_replaced(make_tokenizer: Maker) -> None:
    ids = {tuple(make_tokenizer().token_bytes(i)): i for i in range(256)}
    assert make_tokenizer().decode([ids[(0xE6,)], ids[(0x41,)], ids[(0xFF,)]]) == "\ufffdA\ufffd"


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"model": None, "tokens": None, "token_type": None, "bos_token_id": None}, "none"),
    ({"model": "none", "tokens": None, "token_type": None, "bos_token_id": 1}, "none"),
    ({"model": "llama"}, "llama"),
    ({"pre": "deepseek-llm"}, "gpt2/deepseek-llm"),
    ({"pre": "default"}, "gpt2/default"),
    ({"pre": None}, "gpt2/(no pre-tokenizer)"),
]


@pytest.mark.parametrize(("changes", "kind"), UNSUPPORTED)
def test_unsupported_tokenizers_load_for_ids_only(make_tokenizer: Maker, changes: dict[str, Any], kind: str) -> None:
    tokenizer = make_tokenizer(**changes)
    assert (tokenizer.kind, tokenizer.supported) == (kind, False)
    assert not tokenizer.has_template
    calls: list[Callable[[], object]] = [
        lambda: tokenizer.encode("x"),
        lambda: tokenizer.decode([1]),
        lambda: tokenizer.token_bytes(1),
        lambda: tokenizer.render([{"role": "user", "content": "x"}]),
    ]
    for call in calls:
        with pytest.raises(Unsupported) as caught:
            call()
        assert kind in caught.value.message
    stream = tokenizer.stream(["x"])
    assert [stream.push(i) for i in (0, 1, 5000)] == [("", None)] * 3
    assert stream.finish() == ""


PLAIN: dict[str, Any] = {"token_type": None, "bos_token_id": None}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"merges": ["h e", "hello"]}, "merge 1"),
    ({"merges": ["h Q", "zz z"]}, "merge 0"),
    ({"merges": ["h e", "l l", "he ll"], "tokens": [*BYTES, "he", "ll"], **PLAIN}, "merge 2"),
    ({"merges": [""]}, "merge 0"),
    ({"merges": [" h"]}, "merge 0"),
    ({"merges": ["h"], "tokens": [*BYTES, ""], **PLAIN}, "merge 0"),
    ({"merges": [1, 2]}, "merges' must hold strings"),
    ({"tokens": [1, 2]}, "tokens' must hold strings"),
    ({"token_type": [1, 2]}, "one integer for each of"),
    ({"token_type": ["a"]}, "token_type' must be ndarray"),
    ({"model": 3}, "model' must be str"),
    ({"bos_token_id": "1"}, "bos_token_id' must be int"),
    ({"add_bos_token": 1}, "add_bos_token' must be bool"),
]


@pytest.mark.parametrize(("changes", "match"), BROKEN)
def test_inconsistent_vocabularies(make_tokenizer: Maker, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelFormatError, match=match):
        make_tokenizer(**changes)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_tokenizer(tmp_path / "absent.gguf")


def vectors() -> list[str]:
    """llama.cpp's tokenizer test texts."""
    return (DATA / "ggml-vocab-gpt-2.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")


def test_smollm2_texts_survive_and_stream(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    for text in vectors():
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        assert "".join(stream.push(i)[0] for i in ids) + stream.finish() == tokenizer.decode(ids) == text


def test_smollm2_references(smollm2_path: Path) -> None:
    references = json.loads((DATA / "smollm2-refs.json").read_text())
    with GGUFFile(smollm2_path) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer.eos_ids >= {2}
    assert len(references) >= 7
    for reference in references:
        prompt = reference["prompt"]
        text = prompt if isinstance(prompt, str) else tokenizer.render(prompt)
        assert text == reference["rendered"]
        assert tokenizer.encode(text, add_special=isinstance(prompt, str)) == reference["ids"]
        assert tokenizer.decode(reference["ids"], skip_special=False) == text
        assert tokenizer.decode(reference["greedy"]) == reference["text"]
