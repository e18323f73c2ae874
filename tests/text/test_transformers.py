"""The same as Hugging Face transformers: rendered templates byte for byte, ids and texts of folders.

Skipped where transformers is not installed; it is no dependency. (pip install transformers tiktoken protobuf)
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miro_cy.errors import BadField
from miro_cy.formats.gguf import GGUFFile
from miro_cy.text import Tokenizer, load_tokenizer
from miro_cy.text.bytelevel import ByteLevelBPE
from miro_cy.text.template import ChatTemplate
from miro_cy.text.vocabulary import read_merges, read_vocabulary

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Files = Callable[[dict[str, Any]], Path]

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": " Why is <b>the sky</b> blue? 'é' {{ x }}\n"}
ANSWER = {"role": "assistant", "content": "\n<think>\nhm\n</think>\n\nScattering. "}
CALL = {"name": "add", "arguments": {"a": 1, "b": "é<"}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Why?"}],
    "many": [USER, ANSWER] * 4 + [USER],
    "ends with the answer": [USER, ANSWER],
    "not alternating": [USER, USER],
    "empty": [{"role": "user", "content": ""}],
    "think": [{"role": "user", "content": "/no_think hi"}, ANSWER],
    "reasoning": [USER, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}, USER],
    "reasoning by another name": [USER, {"role": "assistant", "content": "4", "reasoning": "2+2"}],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "tools, no content": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "name": "add", "tool_call_id": "1", "content": "3"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def outcome(render: Callable[[], str], error: type[Exception]) -> str | None:
    """The text, or None for a conversation that is refused."""
    try:
        return render()
    except error:
        return None


def reference(source: str, messages: list[dict[str, Any]], names: dict[str, str] = NAMES, **options: Any) -> str | None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    library = Library(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **names)
    return outcome(lambda: tokenizer.apply_chat_template(messages, tokenize=False, **options), Exception)


def conversations() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name, messages in CONVERSATIONS.items():
        yield name, messages
        yield f"{name}, system", [SYSTEM, *messages]
    yield "system alone", [SYSTEM]


@pytest.mark.parametrize("generation", [True, False])
def test_templates_of_real_models(reference_data: Path, generation: bool) -> None:
    sources = sorted((reference_data / "templates").glob("*.jinja"))
    assert len(sources) == 6
    for path, (name, messages) in itertools.product(sources, conversations()):
        source = path.read_text()
        expected = reference(source, messages, add_generation_prompt=generation)
        template = ChatTemplate(source, NAMES)
        found = outcome(lambda: template.render(messages, add_generation_prompt=generation), BadField)  # noqa: B023
        assert found == expected, f"{path.name}, {name}"


@pytest.mark.parametrize("name", ["phi-3", "qwen2"])
def test_templates_of_gguf_files(reference_data: Path, name: str) -> None:
    path = reference_data / "vocab" / f"ggml-vocab-{name}.gguf"
    tokenizer = load_tokenizer(path)
    with GGUFFile(path) as file:
        source = file.get("tokenizer.chat_template", str)
        names = read_vocabulary(file).names
    for label, messages in conversations():
        expected = reference(source, messages, names, add_generation_prompt=True)
        found = outcome(lambda: tokenizer.render(messages), BadField)  # noqa: B023
        assert found == expected, label


SOURCES = [
    "{{ bos_token }}{{ eos_token }}{{ unk_token }}|{{ pad_token }}|{{ tools is none }}{{ documents }}\n",
    "{% for m in messages %}\n    {{- loop.index0 }} {{ m }}\n{% endfor %}\n\n",
    "{% for m in messages %}{{ m | tojson }}{{ m.tool_calls | tojson(indent=2) if m.tool_calls }}{% endfor %}",
    "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + loop.index %}{% endfor %}{{ ns.x }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% continue %}{% endfor %}x",
    "{% generation %}{{ messages[0].content | trim | replace('b', '*') | upper | indent(3, true) }}{% endgeneration %}",
    "{{ messages[0].role.title() }}{{ messages[-1]['content'][2:8] }}{{ messages | map(attribute='role') | list }}",
    "{{ raise_exception('no') }}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%Y') }}",
    "{{ messages[0].content.split('b') }}{{ messages[0] | items | list }}{{ 'a' in messages[0].content }}",
    "{% macro m(x, y='z') -%}\n  {{ x ~ y }}\n{%- endmacro %}{{ m('a') }}{% call(u) m(1) %}{% endcall %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('name') | first }}",
]


@pytest.mark.parametrize("source", SOURCES)
def test_templates_of_all_kinds(source: str) -> None:
    for name, messages in conversations():
        expected = reference(source, messages)
        found = outcome(lambda: ChatTemplate(source, NAMES).render(messages, add_generation_prompt=False), BadField)  # noqa: B023
        assert found == expected, name


TEXTS = [
    "", " ", "  ", "hello world", " hello", "hello  world ", "é東🚀", "<s>hello", "<s> hello", "hello<|im_end|> hello",
    "<|im_end|><tool> x <tool>", "a\n\nb\t", "\u2029\xa0x", "12345", "e\u0301", "'S's",
]  # fmt: skip


def same(folder: Path, texts: list[str]) -> Tokenizer:
    """Both load the folder, and give the same ids and texts; BOS twice is theirs alone."""
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    for text in texts:
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == plain, text
        whole = theirs.encode(text)
        assert ours.encode(text) == (whole[1:] if whole[:2] == [ours.bos_id] * 2 else whole), text
        for skip in (True, False):
            for ids in (plain, whole, plain[1:]):
                assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    return ours


CONFIGS: list[dict[str, Any]] = [
    {},
    {"bos_token": "<s>", "eos_token": "<|im_end|>"},
    {"bos_token": "<s>", "unk_token": "hello"},
    {"bos_token": "<s>", "add_bos_token": True, "eos_token": {"content": "<tool>", "__type": "AddedToken"}},
    {
        "bos_token": None,
        "added_tokens_decoder": {
            "262": {"content": "<s>", "special": True, "lstrip": False, "rstrip": False, "normalized": False},
            "265": {"content": "<a>", "special": True, "lstrip": True, "rstrip": True, "normalized": False},
        },
    },
]


@pytest.mark.parametrize("config", CONFIGS)
def test_folders(make_folder: Files, tokenizer_json: Callable[..., dict[str, Any]], config: dict[str, Any]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    files = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": config}
    same(make_folder(files), [*TEXTS, "x <a>  y", "<a>"])


@pytest.mark.parametrize("template", ["{{ bos_token }}x", [{"name": "default", "template": "{{ eos_token }}y"}]])
def test_template_of_a_folder(make_folder: Files, tokenizer_json: Callable[..., dict[str, Any]], template: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    files: dict[str, Any] = {"tokenizer.json": tokenizer_json()}
    for more in ({}, {"chat_template.jinja": b"{{ bos_token }}\r\nfile\n\n"}):
        folder = make_folder(files | {"tokenizer_config.json": config | {"chat_template": template}} | more)
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        expected = theirs.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        assert load_tokenizer(folder).render([USER]) == expected


def test_sentencepiece_folder(make_folder: Files, reference_data: Path, tmp_path: Path) -> None:
    """The spaces around special tokens. (transformers 5 merges some runs of spaces differently from SentencePiece.)"""
    for package in ("tiktoken", "google.protobuf"):  # which transformers wants to read a tokenizer.model
        pytest.importorskip(package, reason=f"{package} is not installed")
    tokenizer = load_tokenizer(reference_data / "vocab" / "ggml-vocab-llama-spm.gguf")
    pieces = tokenizer._codec._pieces  # type: ignore[union-attr]
    from miro_cy.text import spm

    data = b"".join(
        spm._field(1, spm._piece(token, score, kind))
        for token, score, kind in zip(pieces.tokens, pieces.scores.tolist(), pieces.types, strict=True)
    )
    data += spm._field(2, spm._number(3, 2) + spm._number(35, 1) + spm._number(40, 0))
    data += spm._field(3, spm._number(3, 1) + spm._number(4, 0) + spm._number(5, 1))
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    config |= NAMES
    rnd = random.Random(7)
    words = ["<s>", "</s>", "Hello", " world", "é", "\n", "12", "東", "🦙", ",", " a"]
    texts = ["Hello"] + ["".join(rnd.choices(words, k=rnd.randint(1, 8))).lstrip(" ") for _ in range(200)]
    folder = make_folder({"tokenizer.model": data, "tokenizer_config.json": config})
    ours = same(folder, texts)
    assert all(ours.encode(text) == tokenizer.encode(text) for text in [*texts, " Hello", "  x  y"])


def test_large_folders(make_folder: Files, reference_data: Path) -> None:
    """Llama 3's and Qwen 2's vocabularies, written as transformers has them."""
    from tokenizers import AddedToken, decoders, processors

    for name, bos in (("llama-bpe", "<|begin_of_text|>"), ("qwen2", None)):
        with GGUFFile(reference_data / "vocab" / f"ggml-vocab-{name}.gguf") as file:
            vocabulary = read_vocabulary(file)
            library = ByteLevelBPE(vocabulary, read_merges(file))._bpe
        library.decoder = decoders.ByteLevel()
        specials = [special.text for special in vocabulary.specials() if special.control]
        library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
        if bos is not None:
            library.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, vocabulary.bos_id)]
            )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": vocabulary.names["eos_token"],
        }
        files = {"tokenizer.json": json.loads(library.to_str()), "tokenizer_config.json": config}
        texts = Path(reference_data / "vocab" / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode()
        ours = same(make_folder(files), [*texts.split("\n__ggml_vocab_test__\n"), f"a {specials[0]} b{specials[1]}"])
        gguf = load_tokenizer(reference_data / "vocab" / f"ggml-vocab-{name}.gguf")
        assert ours.eos_ids == gguf.eos_ids
        assert ours.encode(texts) == gguf.encode(texts)
