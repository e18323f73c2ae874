"""What a GGUF file says about its tokenizer: entries, their types, and the special ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from miro_cy.errors import ModelFormatError
from miro_cy.formats.gguf import GGUFFile

_NONE_ID = 2**32 - 1  # how some writers say "no such token"
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Control tokens that end a turn whatever the file's eos_token_id says: many files name only one of theirs.
END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
)  # fmt: skip


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Entries and special ids. `types[i]` is the TokenType of `tokens[i]`; both are empty when the file has none."""

    label: str
    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    template: str | None
    specials: dict[str, str]  # bos_token and so on, by the names chat templates use

    @property
    def kind(self) -> str:
        """Tokenizer model and pre-tokenizer, as in "gpt2/smollm"."""
        if self.model != "gpt2":
            return self.model
        return f"{self.model}/{self.pre or '(no pre-tokenizer)'}"


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Raises ModelFormatError naming the key that is inconsistent."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    types = _types(file, len(tokens))
    eos_id, eot_id, eom_id = (_special(file, name, len(tokens)) for name in _EOS_KEYS)
    bos_id = _special(file, "bos_token_id", len(tokens))
    named = {i for i, kind in enumerate(types) if kind == TokenType.CONTROL and tokens[i] in END_OF_TURN}
    special_ids = {
        "bos_token": bos_id,
        "eos_token": eos_id,
        "unk_token": _special(file, "unknown_token_id", len(tokens)),
        "pad_token": _special(file, "padding_token_id", len(tokens)),
    }
    return Vocabulary(
        label=str(file.path),
        model=file.get("tokenizer.ggml.model", str, "none") or "none",
        pre=file.get("tokenizer.ggml.pre", str, None),
        tokens=tokens,
        types=types,
        bos_id=bos_id,
        eos_ids=frozenset({i for i in (eos_id, eot_id, eom_id) if i is not None} | named),
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool, False),
        template=file.get("tokenizer.chat_template", str, None),
        specials={name: tokens[i] for name, i in special_ids.items() if i is not None and tokens},
    )


def read_merges(file: GGUFFile) -> list[str]:
    """The BPE merges, best first; a vocabulary of bytes alone has none."""
    return _strings(file, "tokenizer.ggml.merges")


def _strings(file: GGUFFile, key: str) -> list[str]:
    items: list[str] = file.get(key, list, [])
    if items and not isinstance(items[0], str):
        raise ModelFormatError(f"{file.path}: metadata key {key!r} must hold strings")
    return items


def _types(file: GGUFFile, n_tokens: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types = file.get(key, np.ndarray, None)
    if types is None:
        return [TokenType.NORMAL] * n_tokens
    if len(types) != n_tokens or types.dtype.kind not in "iu":
        raise ModelFormatError(f"{file.path}: metadata key {key!r} must hold one integer for each of {n_tokens} tokens")
    return [int(kind) for kind in types]


def _special(file: GGUFFile, name: str, n_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    token_id: int | None = file.get(key, int, None)
    if token_id is None or token_id in (-1, _NONE_ID):
        return None
    limit = n_tokens or 2**31
    if not 0 <= token_id < limit:
        raise ModelFormatError(f"{file.path}: metadata key {key!r} is {token_id}; it must be below {limit}")
    return token_id
