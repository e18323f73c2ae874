"""SentencePiece vocabularies: in GGUF files, and as `tokenizer.model`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.errors import BadField, ModelFormatError, ModelNotFound
from miro_cy.text import Tokenizer, load_tokenizer
from miro_cy.text.specials import MAX_SPECIAL_CHARS, Special, Splitter

Maker = Callable[..., Tokenizer]
Bytes = Callable[..., bytes]
Folder = Callable[[dict[str, Any]], Path]
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# What a SentencePiece vocabulary cannot tell from a space is left out.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁") | st.sampled_from(" hi<>"))


def pieces(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    """The tokens of a text by their bytes; no BOS."""
    ids = tokenizer.encode(text, add_special=False, **options)
    return [tokenizer.token_bytes(i, skip_special=False).decode("latin-1") for i in ids]


@pytest.fixture(scope="module")
def spm(make_spm: Maker) -> Tokenizer:
    return make_spm()


@pytest.fixture(scope="module")
def bare(make_spm: Maker) -> Tokenizer:
    return make_spm(add_space_prefix=False)


def test_kind_and_special_ids(spm: Tokenizer) -> None:
    assert (spm.kind, spm.supported) == ("llama", True)
    assert (spm.bos_id, spm.eos_ids, spm.add_bos) == (1, {2}, True)


def test_pieces_merge_best_score_first(spm: Tokenizer, bare: Tokenizer) -> None:
    assert pieces(spm, "hi hi") == [" hi", " hi"]
    assert pieces(bare, "hi hi") == ["hi", " hi"]
    assert pieces(bare, "abb") == ["ab", "b"]


def test_space_before_a_text_and_not_after_special_tokens(spm: Tokenizer, bare: Tokenizer) -> None:
    """What transformers calls legacy=false."""
    assert pieces(spm, "hi") == [" hi"]
    assert pieces(spm, " hi") == [" ", " hi"]
    assert pieces(spm, "<|user|>hi") == ["<|user|>", "hi"]
    assert pieces(spm, "<|user|> hi") == ["<|user|>", " hi"]
    assert pieces(spm, "hi<tool>hi</s> hi") == [" hi", "<tool>", "hi", "</s>", " hi"]
    assert pieces(spm, "") == pieces(bare, "") == []
    assert pieces(bare, " hi") == [" hi"]


def test_bos_in_front_keeps_the_space(spm: Tokenizer, make_spm: Maker) -> None:
    hi = spm.encode("hi", add_special=False)
    assert spm.encode("hi") == [1, *hi]
    assert spm.encode("<s>hi").count(1) == 1
    assert spm.encode("") == [1]
    assert make_spm(add_bos_token=False).encode("hi") == hi


def test_bytes_stand_for_what_has_no_piece(spm: Tokenizer) -> None:
    assert pieces(spm, "1é\0") == [" ", "1", "\xc3", "\xa9", "\0"]
    assert spm.decode(spm.encode("1é東\n\0")) == "1é東\n\0"


def test_unknown_characters_without_byte_pieces(make_spm: Maker) -> None:
    tokens = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("▁", 0.0, NORMAL), ("h", -1.0, NORMAL)]
    assert make_spm(tokens).encode("hé") == [1, 2, 3, 0]
    with pytest.raises(BadField, match="no tokens for all characters"):
        make_spm(tokens, unknown_token_id=None).encode("hé")
    # Some bytes are not enough to stand for every character.
    assert make_spm([*tokens, ("<0xC3>", 0.0, BYTE)]).encode("é", add_special=False) == [2, 0]


def test_control_tokens_spelled_out(spm: Tokenizer) -> None:
    assert spm.encode("<|user|>", add_special=False) == [269]
    spelled = spm.encode("<|user|><tool>", add_special=False, parse_special=False)
    assert 269 not in spelled
    assert spelled[-1] == 270
    assert spm.decode(spelled) == "<|user|><tool>"
    assert spm.decode([269, 270]) == "<tool>"
    assert spm.decode([269, 270], skip_special=False) == "<|user|><tool>"


@given(TEXT, st.booleans())
def test_every_character_survives(spm: Tokenizer, bare: Tokenizer, text: str, parse_special: bool) -> None:
    for tokenizer in (spm, bare):
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        stream = tokenizer.stream(skip_special=False)
        streamed = "".join(stream.push(i)[0] for i in ids) + stream.finish()
        assert streamed == tokenizer.decode(ids, skip_special=False) == text


@given(st.lists(st.integers(0, 270)), st.booleans(), st.booleans())
def test_any_ids_stream_as_they_decode(spm: Tokenizer, ids: list[int], skip: bool, continues: bool) -> None:
    stream = spm.stream(skip_special=skip, continues=continues)
    streamed = "".join(stream.push(i)[0] for i in ids) + stream.finish()
    assert streamed == spm.decode(ids, skip_special=skip, continues=continues)
    whole = b"".join(spm.token_bytes(i, skip_special=skip) for i in ids)
    if not continues:
        whole = whole.removeprefix(b" ")
    assert streamed == whole.decode(errors="replace")


def test_space_stays_where_a_text_goes_on(spm: Tokenizer) -> None:
    ids = spm.encode("hi", add_special=False)
    assert (spm.decode(ids), spm.decode(ids, continues=True)) == ("hi", " hi")
    assert spm.stream().push(ids[0]) == ("hi", None)
    assert spm.stream(continues=True).push(ids[0]) == (" hi", None)
    # Only one, and only at the beginning.
    assert spm.decode([*spm.encode("  hi", add_special=False), *ids]) == "  hi hi"
    # A stop string sees the text that is sent.
    assert spm.stream(["hi"]).push(ids[0]) == ("", "hi")
    assert spm.stream([" hi"]).push(ids[0]) == ("hi", None)


def test_the_mark_of_a_space_is_a_space(spm: Tokenizer) -> None:
    assert spm.encode("hi▁hi") == spm.encode("hi hi")


def test_user_defined_spaces_may_hold_the_space_before_a_text(make_spm: Maker) -> None:
    tokens = [("<unk>", 0.0, UNKNOWN), ("▁", 0.0, NORMAL), ("h", -1.0, NORMAL), ("  ", 0.0, USER), ("▁▁▁", 0.0, USER)]
    tokenizer = make_spm(tokens)
    for text in ("h", " h", "  h", "   h   h"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" h") == [3, 2]
    assert tokenizer.encode("  h") == [4, 2]


def test_white_space_after_special_tokens_of_phi3(make_spm: Maker, spm: Tokenizer) -> None:
    phi = make_spm(architecture="phi3")
    assert pieces(phi, "<|user|>\n hi<s> hi") == ["<|user|>", "hi", "<s>", " hi"]
    assert pieces(spm, "<|user|>\nhi") == ["<|user|>", "\n", "hi"]


def test_file_without_types(make_spm: Maker, spm: Tokenizer) -> None:
    tokenizer = make_spm(token_type=None)
    for text in ("hi é", "<s>hi"):
        assert tokenizer.encode(text) == spm.encode(text)


def test_file_without_scores_serves_ids(make_spm: Maker) -> None:
    assert not make_spm(scores=None).supported


def test_odd_entries_only_keep_their_places(make_spm: Maker) -> None:
    """Twice the same, nothing at all, a NUL: real files have such entries, which no text can reach."""
    tokens = [
        ("<unk>", 0.0, UNKNOWN),
        ("▁", 0.0, NORMAL),
        ("h", -1.0, NORMAL),
        ("h", -1.0, NORMAL),
        ("", 0.0, NORMAL),
        ("a\0b", 0.0, USER),
        ("x", -2.0, UNUSED),
        ("y", -3.0, NORMAL),
    ]
    tokenizer = make_spm(tokens)
    assert tokenizer.encode("hy") == [1, 2, 7]
    assert tokenizer.decode([1, 2, 3, 4, 6, 7]) == "hhy"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"scores": [("f32", 1.0)]}, "scores' must hold one number for each of 271"),
    ({"scores": ["a"]}, "scores' must be ndarray"),
    ({"scores": [("f32", float("nan"))] * 271}, "not finite"),
    ({"token_type": [("i32", 6)] * 271}, "'<unk>' is not the name of a byte"),
    ({"add_space_prefix": 1}, "add_space_prefix' must be bool"),
    ({"unknown_token_id": 271}, "unknown_token_id' is 271"),
]


@pytest.mark.parametrize(("changes", "match"), BROKEN)
def test_inconsistent_vocabularies(make_spm: Maker, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelFormatError, match=match):
        make_spm(**changes)


# --- tokenizer.model ---------------------------------------------------------------------------------------------


def test_model_file_gives_the_ids_of_the_gguf_file(spm: Tokenizer, model_bytes: Bytes, make_folder: Folder) -> None:
    tokenizer = load_tokenizer(make_folder({"tokenizer.model": model_bytes()}))
    assert (tokenizer.kind, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == ("tokenizer.model", 1, {2}, True)
    assert tokenizer.vocab_size == spm.vocab_size
    for text in ("hi", " hi", "", "<s>hi <|user|> hi", "é東 1 <tool>"):
        assert tokenizer.encode(text) == spm.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


def test_settings_beside_the_model_file(model_bytes: Bytes, make_folder: Folder) -> None:
    def make(**config: Any) -> Tokenizer:
        return load_tokenizer(make_folder({"tokenizer.model": model_bytes(), "tokenizer_config.json": config}))

    assert pieces(make(legacy=True), "hi<|user|>hi") == [" hi", "<|user|>", " hi"]
    assert pieces(make(add_prefix_space=False), "hi") == ["hi"]
    assert 1 not in make(add_bos_token=False).encode("hi")
    assert make(bos_token=None).add_bos is False
    added = {"content": "<new>", "lstrip": True, "rstrip": True, "special": True}
    tokenizer = make(added_tokens_decoder={"271": added, "269": {"content": "<|user|>", "special": True}})
    assert tokenizer.vocab_size == 272
    assert pieces(tokenizer, "hi \n<new>  hi") == [" hi", "<new>", "hi"]
    assert tokenizer.decode([271]) == ""


def test_added_tokens_file(model_bytes: Bytes, make_folder: Folder) -> None:
    files = {"tokenizer.model": model_bytes(), "added_tokens.json": {"<a>": 271, "<|im_end|>": 272}}
    tokenizer = load_tokenizer(make_folder(files))
    assert tokenizer.encode("<a><|im_end|>", add_special=False) == [271, 272]
    assert tokenizer.decode([271, 272]) == "<a>"
    assert tokenizer.eos_ids == {2, 272}


def test_unigram_model_file(model_bytes: Bytes, make_folder: Folder) -> None:
    tokenizer = load_tokenizer(make_folder({"tokenizer.model": model_bytes(trainer={3: 1}, normalizer={3: 0})}))
    assert pieces(tokenizer, "hi") == ["hi"]
    assert tokenizer.decode(tokenizer.encode("hi é")) == "hi é"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trainer": {3: 3}}, "tokenizer.model/neither unigram nor BPE"),
    ({"trainer": {24: 1}}, "tokenizer.model/white space as suffix"),
    ({"normalizer": {5: 0}}, "tokenizer.model/white space not escaped"),
    ({"character_map": b"\x10\0\0\0"}, "tokenizer.model/a character map"),
]


@pytest.mark.parametrize(("changes", "kind"), REFUSED)
def test_models_that_serve_ids_only(
    model_bytes: Bytes, make_folder: Folder, changes: dict[str, Any], kind: str
) -> None:
    tokenizer = load_tokenizer(make_folder({"tokenizer.model": model_bytes(**changes)}))
    assert (tokenizer.kind, tokenizer.supported, tokenizer.vocab_size) == (kind, False, 271)


def test_damaged_model_files(model_bytes: Bytes, make_folder: Folder) -> None:
    whole = model_bytes()
    for data, match in (
        (b"", "has no entries"),
        (whole[:100], "goes beyond the end|is damaged"),
        (b"\x0b", "unknown wire type 3"),
        (b"\xff" * 20, "more than 10 bytes"),
        (b"\x0a\xff\xff\xff\xff\x0f", "a field of 4294967295 bytes"),
        (b"\x0a\x03\x0a\x01\xff", "is damaged"),
        (b"\x0a\x02\x18\x09", "the unknown type 9"),
        (b"\x0a\x02\x08\x09", "fields of the wrong type"),
        (model_bytes([("a", float("inf"), NORMAL)]), "not finite"),
        (model_bytes([("zz", 0.0, BYTE)]), "not the name of a byte"),
    ):
        with pytest.raises(ModelFormatError, match=match):
            load_tokenizer(make_folder({"tokenizer.model": data}))


def test_files_that_are_none(make_folder: Folder) -> None:
    folder = make_folder({})
    (folder / "tokenizer.model").mkdir()
    with pytest.raises(ModelFormatError, match="is not a file"):
        load_tokenizer(folder)
    with pytest.raises(ModelNotFound):
        load_tokenizer(folder / "absent")


# --- special tokens in a text ------------------------------------------------------------------------------------


def test_splitter_takes_the_leftmost_then_the_longest() -> None:
    specials = [Special(text, i, control=True) for i, text in enumerate(("ab", "abc", "bcd", "]", "^", "\\d", "-"))]
    found = [(part, special and special.text) for part, special in Splitter(specials).split("xabcd]^1\\d-ab")]
    expected = [("x", "abc"), ("d", "]"), ("", "^"), ("1", "\\d"), ("", "-"), ("", "ab"), ("", None)]
    assert found == expected
    assert list(Splitter([]).split("ab")) == [("ab", None)]


def test_splitter_ignores_what_is_no_token() -> None:
    specials = [Special("", 0, control=True), Special("x" * (MAX_SPECIAL_CHARS + 1), 1, control=True)]
    text = "x" * 1000
    assert list(Splitter(specials).split(text)) == [(text, None)]


@given(st.text("ab<>", max_size=30), st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=6))
def test_splitter_loses_nothing(text: str, tokens: list[str]) -> None:
    parts = list(Splitter(Special(token, i, control=True) for i, token in enumerate(tokens)).split(text))
    assert "".join(part + (special.text if special else "") for part, special in parts) == text
    assert all(token not in part for part, _ in parts for token in tokens)


def test_ids_are_plain_integers(spm: Tokenizer) -> None:
    assert all(type(i) is int for i in spm.encode("<s>hi é"))
    assert spm.decode(np.array([258 + 5], np.int32)) == "hi"
