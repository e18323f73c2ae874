"""Hugging Face folders: tokenizer.json, and what the files beside it say of special tokens and templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.errors import BadField, ModelFormatError, Unsupported
from miro_cy.text import Tokenizer, load_tokenizer

Json = Callable[..., dict[str, Any]]
Folder = Callable[[dict[str, Any]], Path]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BOS, END, TOOL = 262, 263, 264
SPACE = "▁"


@pytest.fixture
def make(make_folder: Folder, tokenizer_json: Json) -> Callable[..., Tokenizer]:
    """A tokenizer of the folder's files; keyword arguments replace parts of tokenizer.json."""

    def load(files: dict[str, Any] | None = None, **parts: Any) -> Tokenizer:
        return load_tokenizer(make_folder({"tokenizer.json": tokenizer_json(**parts)} | (files or {})))

    return load


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tokenizer_json: Json) -> Tokenizer:
    import json

    folder = tmp_path_factory.mktemp("loaded")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return load_tokenizer(folder)


def test_a_folder_without_tokenizer_serves_ids(make_folder: Folder) -> None:
    files = {
        "config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "generation_config.json": {"eos_token_id": [2, 7]},
    }
    tokenizer = load_tokenizer(make_folder(files))
    assert (tokenizer.kind, tokenizer.supported, tokenizer.vocab_size) == ("none", False, 0)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, False, {2, 7})
    with pytest.raises(Unsupported, match="none"):
        tokenizer.encode("x")


def test_golden_folders_have_no_tokenizer(reference_data: Path) -> None:
    folders = sorted((reference_data / "hf").iterdir())
    assert len(folders) > 10
    for folder in folders:
        tokenizer = load_tokenizer(folder)
        assert not tokenizer.supported
        assert tokenizer.eos_ids, folder.name


def test_tokenizer_json(loaded: Tokenizer) -> None:
    assert (loaded.kind, loaded.supported, loaded.vocab_size) == ("tokenizer.json/BPE", True, 265)
    ids = loaded.encode("hello<|im_end|><tool> world", add_special=False)
    pieces = [b"hello", b"<|im_end|>", b"<tool>", b" wo", b"r", b"l", b"d"]
    assert [loaded.token_bytes(i, skip_special=False) for i in ids] == pieces
    assert loaded.decode(ids) == "hello<tool> world"
    spelled = loaded.encode("<|im_end|><tool>", add_special=False, parse_special=False)
    assert END not in spelled
    assert spelled[-1] == TOOL
    assert loaded.decode(spelled) == "<|im_end|><tool>"


@given(TEXT, st.booleans())
def test_every_character_survives(loaded: Tokenizer, text: str, parse_special: bool) -> None:
    ids = loaded.encode(text, add_special=False, parse_special=parse_special)
    stream = loaded.stream(skip_special=False)
    streamed = "".join(stream.push(i)[0] for i in ids) + stream.finish()
    assert streamed == loaded.decode(ids, skip_special=False) == text


def test_truncation_and_padding_are_not_for_prompts(make: Callable[..., Tokenizer]) -> None:
    tokenizer = make(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "!",
        },
    )  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("abcdefgh")) == "abcdefgh"


# --- BOS and EOS -------------------------------------------------------------------------------------------------

BOS_MATRIX: list[tuple[dict[str, Any], bool, bool]] = [
    # tokenizer_config.json, whether the post-processor puts BOS first, whether texts get one
    ({"bos_token": "<s>"}, True, True),
    ({"bos_token": "<s>"}, False, False),
    ({"bos_token": "<s>", "add_bos_token": True}, False, True),
    ({"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": True}, False, True),
    ({"bos_token": "<s>", "add_bos_token": False}, True, False),
    ({"bos_token": None, "add_bos_token": True}, False, False),
    ({"bos_token": "<absent>", "add_bos_token": True}, False, False),
    ({}, True, True),
]


@pytest.mark.parametrize(("config", "processor", "adds"), BOS_MATRIX)
def test_bos_only_when_asked_for_and_never_twice(
    make: Callable[..., Tokenizer], config: dict[str, Any], processor: bool, adds: bool
) -> None:
    parts = {} if processor else {"post_processor": None}
    tokenizer = make({"tokenizer_config.json": config, "config.json": {"bos_token_id": BOS}}, **parts)
    assert (tokenizer.add_bos, tokenizer.bos_id) == (adds, BOS)
    for text in ("hello", "", "<s>hello"):
        written = text.count("<s>")
        assert tokenizer.encode(text).count(BOS) == max(written, int(adds))
        assert tokenizer.encode(text, add_special=False).count(BOS) == written


def test_bos_behind_other_processors(make: Callable[..., Tokenizer], tokenizer_json: Json) -> None:
    template = tokenizer_json()["post_processor"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    tokenizer = make(post_processor={"type": "Sequence", "processors": [byte_level, template]})
    assert tokenizer.encode("hello")[0] == BOS
    ending = {**template, "single": [*template["single"][1:], template["single"][0]]}
    assert make(post_processor=ending).add_bos is False


def test_eos_is_the_union_of_all_sources(make: Callable[..., Tokenizer]) -> None:
    files = {
        "tokenizer_config.json": {"eos_token": "<tool>"},
        "config.json": {"eos_token_id": 5, "text_config": {"eos_token_id": [6]}},
        "generation_config.json": {"eos_token_id": [7, 8, None, -1]},
    }
    assert make(files).eos_ids == {END, TOOL, 5, 6, 7, 8}
    map_only = {"special_tokens_map.json": {"eos_token": {"content": "<tool>"}}}
    assert make(map_only).eos_ids == {END, TOOL}
    # tokenizer_config.json is asked first, and may say that there is none.
    assert make(map_only | {"tokenizer_config.json": {"eos_token": None}}).eos_ids == {END}


# --- tokens that other files add ---------------------------------------------------------------------------------


def test_added_tokens(make: Callable[..., Tokenizer]) -> None:
    added = {
        "265": {"content": "<a>", "special": True, "rstrip": True},
        "266": {"content": "é!", "special": False},
        str(END): {"content": "<|im_end|>", "special": True},
    }
    tokenizer = make({"tokenizer_config.json": {"added_tokens_decoder": added}})
    assert tokenizer.encode("<a>  é!h", add_special=False)[:2] == [265, 266]
    assert tokenizer.decode([265, 266]) == "é!"
    assert tokenizer.vocab_size == 267
    with pytest.raises(ModelFormatError, match="'<b>' should be token 300, but is 265"):
        make({"tokenizer_config.json": {"added_tokens_decoder": {"300": {"content": "<b>"}}}})


# --- decoders ----------------------------------------------------------------------------------------------------

LLAMA_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def llama_parts(decoder: dict[str, Any], **model: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "h", "i", "hi", SPACE + "hi"]
    merges = ["h i", SPACE + " hi"]
    return {
        "added_tokens": [
            {"id": 1, "content": "<s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
             "single_word": False},
        ],
        "pre_tokenizer": None,
        "post_processor": None,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges,
        } | model,
    }  # fmt: skip


def test_sentencepiece_written_as_json(make: Callable[..., Tokenizer]) -> None:
    tokenizer = make(**llama_parts(LLAMA_DECODER))
    for text in ("hi", " hi hi", "é東", "", "  "):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        assert "".join(stream.push(i)[0] for i in ids) + stream.finish() == tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("hi"), continues=True) == " hi"


def test_metaspace_decoder_drops_the_spaces_of_the_first_piece(make: Callable[..., Tokenizer]) -> None:
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    tokenizer = make(**llama_parts(metaspace))
    assert tokenizer.decode([262, 262, 258, 258]) == "hi hi  "
    assert tokenizer.decode([258, 262]) == " hi"
    assert make(**llama_parts(metaspace | {"prepend_scheme": "never"})).decode([262]) == " hi"


def test_older_files_do_not_name_their_model(make: Callable[..., Tokenizer], tokenizer_json: Json) -> None:
    model = {key: value for key, value in tokenizer_json()["model"].items() if key != "type"}
    assert make(model=model).kind == "tokenizer.json/BPE"


def test_dropout_is_not_for_prompts(make: Callable[..., Tokenizer]) -> None:
    tokenizer = make(**llama_parts(LLAMA_DECODER, dropout=0.9))
    assert {tuple(tokenizer.encode("hi hi hi hi")) for _ in range(20)} == {(262,) * 4}


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"decoder": None}, "tokenizer.json/no decoder"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "tokenizer.json/decoder WordPiece"),
        (llama_parts({"type": "Fuse"}, byte_fallback=False, unk_token=None),
         "tokenizer.json/BPE with neither byte tokens nor an unknown token"),
        ({"added_tokens": [], "post_processor": None,
          "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "tokenizer.json/WordLevel"),
    ],
)  # fmt: skip
def test_parts_that_are_not_known_serve_ids(make: Callable[..., Tokenizer], parts: dict[str, Any], kind: str) -> None:
    tokenizer = make({"config.json": {"eos_token_id": 2}}, **parts)
    assert (tokenizer.kind, tokenizer.supported, tokenizer.eos_ids) == (kind, False, {2})


def test_text_the_vocabulary_lacks_is_refused_not_dropped(make: Callable[..., Tokenizer], tokenizer_json: Json) -> None:
    model = tokenizer_json()["model"]
    vocab = {token: i for token, i in model["vocab"].items() if token != "Ċ"}
    tokenizer = make(model={**model, "vocab": vocab})
    with pytest.raises(BadField, match=r"U\+000A"):
        tokenizer.encode("a\nb")


# --- templates ---------------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "hi"}]


def test_templates_and_their_order(make: Callable[..., Tokenizer]) -> None:
    config: dict[str, Any] = {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<s>"}}
    assert make({"tokenizer_config.json": config}).render(USER) == "config <s>"
    jinja = {"chat_template.jinja": b"file\r\n{{ bos_token }}\n"}
    assert make({"tokenizer_config.json": config} | jinja).render(USER) == "file\n<s>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    assert make({"tokenizer_config.json": config | {"chat_template": named}}).render(USER) == "named"
    tokenizer = make({"tokenizer_config.json": config | {"chat_template": named[:1]}})
    with pytest.raises(Unsupported, match=r"no default \(tool_use\)"):
        tokenizer.render(USER)
    with pytest.raises(Unsupported, match="no chat template"):
        make().render(USER)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_bos_of_a_chat_is_the_one_its_template_writes(make: Callable[..., Tokenizer], writes: bool, adds: bool) -> None:
    source = ("{{ bos_token }}" if writes else "") + "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "add_bos_token": adds, "chat_template": source}
    tokenizer = make({"tokenizer_config.json": config})
    ids = tokenizer.encode(tokenizer.render(USER), add_special=False)
    assert ids.count(BOS) == int(writes)
    # Sent as a text, the same prompt gets no second one.
    assert tokenizer.encode(tokenizer.render(USER)).count(BOS) == int(writes or adds)


# --- files that are wrong ----------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer_config.json": b"{"}, "tokenizer_config.json is not valid JSON"),
    ({"tokenizer_config.json": b"[" * 100_000}, "tokenizer_config.json is not valid JSON"),
    ({"tokenizer_config.json": b"\xff"}, "tokenizer_config.json is not valid JSON"),
    ({"tokenizer_config.json": []}, "tokenizer_config.json must hold a JSON object"),
    ({"tokenizer_config.json": {"bos_token": 1}}, "'bos_token' must be a string"),
    ({"tokenizer_config.json": {"bos_token": {"content": 1}}}, "'bos_token' must be a string"),
    ({"tokenizer_config.json": {"bos_token": "\ud800"}}, "'bos_token' is not valid Unicode"),
    ({"tokenizer_config.json": {"add_bos_token": 1}}, "'add_bos_token' must be bool"),
    ({"tokenizer_config.json": {"chat_template": 1}}, "'chat_template' must be str"),
    ({"tokenizer_config.json": {"chat_template": [1]}}, "'chat_template' must list objects"),
    ({"tokenizer_config.json": {"chat_template": [{"name": 1}]}}, "'name' must be str"),
    ({"tokenizer_config.json": {"added_tokens_decoder": []}}, "'added_tokens_decoder' must be dict"),
    ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}}, "added token 'x'"),
    ({"tokenizer_config.json": {"added_tokens_decoder": {"1": 1}}}, "added token '1'"),
    ({"tokenizer_config.json": {"added_tokens_decoder": {"9" * 10: {}}}}, "must be an integer below"),
    ({"tokenizer_config.json": {"added_tokens_decoder": {"9" * 5000: {}}}}, "added token '9999"),
    ({"added_tokens.json": {"<a>": -1}}, "must be an integer below"),
    ({"added_tokens.json": {"<a>": 2**40}}, "must be an integer below"),
    ({"config.json": {"eos_token_id": "2"}}, "config.json: 'eos_token_id'"),
    ({"config.json": {"eos_token_id": [True]}}, "config.json: 'eos_token_id'"),
    ({"config.json": {"text_config": 1}}, "'text_config' must be dict"),
    ({"generation_config.json": {"eos_token_id": -2}}, "generation_config.json: 'eos_token_id'"),
    ({"chat_template.jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
    ({"tokenizer.json": b"{}"}, "tokenizer.json is not a tokenizer"),
    ({"tokenizer.json": b""}, "tokenizer.json is not a tokenizer"),
    ({"tokenizer.json": {"model": {"type": "BPE"}}}, "tokenizer.json is not a tokenizer"),
]


@pytest.mark.parametrize(("files", "match"), WRONG)
def test_errors_name_the_file_and_the_key(make: Callable[..., Tokenizer], files: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelFormatError, match=match):
        make(files)


def test_ids_beyond_reason_cost_nothing(make: Callable[..., Tokenizer], tokenizer_json: Json) -> None:
    whole = tokenizer_json()
    added = [{**whole["added_tokens"][0], "id": 2**31}]
    with pytest.raises(ModelFormatError, match="added token '<s>' has the id 2147483648"):
        make(added_tokens=added)
    vocab = whole["model"]["vocab"] | {"zz": 2**32 - 1}
    with pytest.raises(ModelFormatError, match="ids must lie from 0"):
        make(model={**whole["model"], "vocab": vocab})


def test_deep_pipelines(make: Callable[..., Tokenizer]) -> None:
    decoder: dict[str, Any] = {"type": "ByteLevel"}
    for _ in range(400):
        decoder = {"type": "Sequence", "decoders": [decoder]}
    with pytest.raises(ModelFormatError, match="is not a tokenizer"):
        make(decoder=decoder)


def test_a_pattern_that_backtracks_without_end(make: Callable[..., Tokenizer]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = make(pre_tokenizer=split)
    with pytest.raises(BadField, match="cannot read this text"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.decode(tokenizer.encode("aa")) == "aa"
