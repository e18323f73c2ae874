from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy.text import Tokenizer, load_tokenizer
from miro_cy.text.bytelevel import BYTES

_BUILD = runpy.run_path(str(Path(__file__).parents[1] / "gguf_bytes.py"))["build_gguf"]
WORDS = ["he", "ll", "llo", "hello", "Ġw", "Ġwo"]
MERGES = ["h e", "l l", "ll o", "he llo", "Ġ w", "Ġw o"]
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5
SPECIALS = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<s>": CONTROL, "<tool>": USER, "[PAD]": UNUSED}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """A tokenizer of 267 entries: every byte (except `without`), a few words, a few special tokens.

    Keyword arguments replace (or, None, remove) keys below tokenizer.ggml.
    """
    folder = tmp_path_factory.mktemp("vocab")
    numbers = itertools.count()

    def make(*, without: bytes = b"", template: str | None = TEMPLATE, **changes: Any) -> Tokenizer:
        tokens = [char for char, byte in BYTES.items() if byte not in without] + WORDS + list(SPECIALS)
        keys: dict[str, Any] = {
            "model": "gpt2",
            "pre": "smollm",
            "tokens": tokens,
            "token_type": [("i32", SPECIALS.get(token, NORMAL)) for token in tokens],
            "merges": MERGES,
            "bos_token_id": tokens.index("<s>"),
        }
        keys |= changes
        pairs = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
        if template is not None:
            pairs["tokenizer.chat_template"] = template
        path = folder / f"{next(numbers)}.gguf"
        path.write_bytes(_BUILD(pairs))
        return load_tokenizer(path)

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer()
