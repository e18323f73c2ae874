"""One BOS at most, whoever asks for it: the file's flag, the template, the text itself, or several of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy.formats.gguf import GGUFFile
from miro_cy.prepare import Preparer
from miro_cy.text import Tokenizer, load_tokenizer
from miro_cy.text.template import ChatTemplate
from miro_cy.text.vocabulary import read_vocabulary

Maker = Callable[..., Tokenizer]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi hi"}] * 2}
#: source -> how many BOS it writes
TEMPLATES = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": 0,
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}": 1,
    "<s>{% for m in messages %}{{ m.content }}{% endfor %}": 1,
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ m.content }}{% endfor %}": 1,
    # It begins each turn with one: as transformers has it, the template is right about its model.
    "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}": 4,
}
FLAGS = [True, False, None]


def prompt_ids(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """As the engine makes them."""
    prepare = Preparer(tokenizer, tokenizer.vocab_size, 1000, lambda n_prompt, max_new: None, seed=1).prompt_ids
    return [int(i) for i in prepare(prompt)]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte-level", "llama-bpe", "SentencePiece"])
def test_bos_of_templates_and_tokenizers(
    make_tokenizer: Maker, make_spm: Maker, kind: str, source: str, flag: bool | None
) -> None:
    if kind == "SentencePiece":
        tokenizer = make_spm(add_bos_token=flag)
        tokenizer._template = ChatTemplate(source, {"bos_token": "<s>"})
    else:
        pre = "smollm" if kind == "byte-level" else kind
        tokenizer = make_tokenizer(pre=pre, add_bos_token=flag, template=source)
    bos = tokenizer.bos_id
    adds = flag if flag is not None else kind != "byte-level"  # what the kind always did, where no flag says
    assert tokenizer.add_bos is adds
    chat = prompt_ids(tokenizer, CHAT)
    assert chat.count(bos) == TEMPLATES[source]
    assert (chat[0] == bos) is bool(TEMPLATES[source])
    for text, written in (("hi", 0), ("<s>hi", 1), ("", 0), ("<s>", 1), ("hi<s>", 1)):
        ids = prompt_ids(tokenizer, text)
        added = adds and not text.startswith("<s>")
        assert ids.count(bos) == written + added, text
        assert ids[:1] == [bos] or not (adds or text.startswith("<s>"))
    # A chat that the caller rendered and sends as text gets what the chat got, or the one BOS it lacked.
    rendered = prompt_ids(tokenizer, tokenizer.render(CHAT["messages"]))
    assert rendered.count(bos) == max(TEMPLATES[source], int(adds))


def test_bos_of_real_templates_and_vocabularies(reference_data: Path) -> None:
    """Each template with each vocabulary: never more than the template wrote, never two."""
    sources = [path.read_text() for path in sorted((reference_data / "templates").glob("*.jinja"))]
    seen = set()
    for path in sorted((reference_data / "vocab").glob("*.gguf")):
        tokenizer = load_tokenizer(path)
        with GGUFFile(path) as file:
            names = read_vocabulary(file).names
        bos = names["bos_token"]
        for source in sources:
            tokenizer._template = ChatTemplate(source, names)
            text = tokenizer.render(CHAT["messages"])
            written = text.count(bos)
            assert written <= 1 or bos == "<|endoftext|>"  # that one ends texts too
            chat = prompt_ids(tokenizer, CHAT)
            assert chat.count(tokenizer.bos_id) == written, path.name
            added = [tokenizer.bos_id] if tokenizer.add_bos and not text.startswith(bos) else []
            assert prompt_ids(tokenizer, text) == added + chat
            seen.add((written, tokenizer.add_bos))
    assert {(0, False), (0, True), (1, True)} <= seen
