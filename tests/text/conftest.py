from __future__ import annotations

import itertools
import json
import runpy
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from miro_cy.text import Tokenizer, load_tokenizer
from miro_cy.text.bytelevel import BYTES

_BUILD = runpy.run_path(str(Path(__file__).parents[1] / "gguf_bytes.py"))["build_gguf"]
WORDS = ["he", "ll", "llo", "hello", "Ġw", "Ġwo"]
MERGES = ["h e", "l l", "ll o", "he llo", "Ġ w", "Ġw o"]
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
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


SPM_TOKENS: list[tuple[str, float, int]] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((piece, -float(i), NORMAL) for i, piece in enumerate(("▁", "h", "i", "hi", "▁hi", "▁▁", "1", "ab", "a", "b"))),
    ("<|user|>", 0.0, CONTROL),
    ("<tool>", 0.0, USER),
]


@pytest.fixture(scope="session")
def make_spm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """A SentencePiece vocabulary in a GGUF file: every byte, a few pieces, a few special tokens.

    tokens: (text, score, type) each. Keyword arguments replace (or, None, remove) keys below tokenizer.ggml.
    """
    folder = tmp_path_factory.mktemp("spm")
    numbers = itertools.count()

    def make(
        tokens: Sequence[tuple[str, float, int]] = SPM_TOKENS, *, architecture: str = "llama", **changes: Any
    ) -> Tokenizer:
        names = [token for token, _, _ in tokens]
        keys: dict[str, Any] = {
            "model": "llama",
            "tokens": names,
            "scores": [("f32", score) for _, score, _ in tokens],
            "token_type": [("i32", kind) for _, _, kind in tokens],
            "bos_token_id": names.index("<s>") if "<s>" in names else None,
            "eos_token_id": names.index("</s>") if "</s>" in names else None,
            "unknown_token_id": names.index("<unk>") if "<unk>" in names else None,
        }
        keys |= changes
        pairs: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
        pairs["general.architecture"] = architecture
        path = folder / f"{next(numbers)}.gguf"
        path.write_bytes(_BUILD(pairs))
        return load_tokenizer(path)

    return make


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _numbers(values: dict[int, int]) -> bytes:
    return b"".join(_varint(field << 3) + _varint(value) for field, value in values.items())


@pytest.fixture(scope="session")
def model_bytes() -> Callable[..., bytes]:
    """The bytes of a `tokenizer.model`. trainer, normalizer: numbered fields of these two messages."""

    def make(
        tokens: Sequence[tuple[str, float, int]] = SPM_TOKENS,
        *,
        trainer: dict[int, int] | None = None,
        normalizer: dict[int, int] | None = None,
        character_map: bytes = b"",
    ) -> bytes:
        out = b""
        for token, score, kind in tokens:
            out += _message(1, _message(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _numbers({3: kind}))
        out += _message(2, _numbers({3: 2, 35: 1, 40: 0, 41: 1, 42: 2} | (trainer or {})))
        rules = _message(1, b"identity") + (_message(2, character_map) if character_map else b"")
        return out + _message(3, rules + _numbers({3: 1, 4: 0, 5: 1} | (normalizer or {})))

    return make


@pytest.fixture(scope="session")
def tokenizer_json() -> Callable[..., dict[str, Any]]:
    """A byte-level `tokenizer.json` of 265 entries as an object; keyword arguments replace its parts."""

    def make(**changes: Any) -> dict[str, Any]:
        tokens = [*BYTES, *WORDS]
        specials = ["<s>", "<|im_end|>", "<tool>"]
        made: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": len(tokens) + i,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": text != "<tool>",
                }
                for i, text in enumerate(specials)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [len(tokens)], "tokens": ["<s>"]}},
            },
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": MERGES,
            },
        }
        return made | changes

    return make


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with these files; objects are written as JSON. {"tokenizer_config.json": {...}, ...}"""
    numbers = itertools.count()

    def make(files: dict[str, Any]) -> Path:
        folder = tmp_path / f"model{next(numbers)}"
        folder.mkdir()
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name).write_bytes(data)
        return folder

    return make
