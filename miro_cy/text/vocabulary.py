"""What a GGUF file says about its tokenizer: entries, their types, and the special ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from miro_cy.errors import ModelFormatError
from miro_cy.formats.gguf import GGUFFile
from miro_cy.text.specials import Special

_NONE_ID = 2**32 - 1  # how some writers say "no such token"
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Control tokens that end a turn whatever the file's eos_token_id says: many files name only one of theirs.
END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>", "<|end|>",
)  # fmt: skip
#: In Phi-3's vocabulary, whose other special tokens swallow the white space after them; GGUF has no field for that.
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
#: How SentencePiece vocabularies name the tokens that stand for one byte.
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
    scores: npt.NDArray[np.float32] | None
    unknown_id: int | None
    add_space_prefix: bool
    rstrip: bool  # control tokens but `KEEP_SPACE` take the white space after them with them
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    template: str | None
    names: dict[str, str]  # bos_token and so on, by the names chat templates use

    @property
    def kind(self) -> str:
        """Tokenizer model and pre-tokenizer, as in "gpt2/smollm"."""
        if self.model != "gpt2":
            return self.model
        return f"{self.model}/{self.pre or '(no pre-tokenizer)'}"

    def specials(self) -> Iterator[Special]:
        """Control, unknown and user-defined tokens, in the order of their ids."""
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN):
                rstrip = self.rstrip and kind != TokenType.UNKNOWN and token not in KEEP_SPACE
                yield Special(token, token_id, control=kind != TokenType.USER_DEFINED, rstrip=rstrip)


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Raises ModelFormatError naming the key that is inconsistent."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    eos_id, eot_id, eom_id = (_special(file, name, len(tokens)) for name in _EOS_KEYS)
    bos_id = _special(file, "bos_token_id", len(tokens))
    unknown_id = _special(file, "unknown_token_id", len(tokens))
    model = file.get("tokenizer.ggml.model", str, "none") or "none"
    types = _types(file, tokens, {bos_id, eos_id, unknown_id} if model == "llama" else None)
    named = {i for i, kind in enumerate(types) if kind == TokenType.CONTROL and tokens[i] in END_OF_TURN}
    special_ids = {
        "bos_token": bos_id,
        "eos_token": eos_id,
        "unk_token": unknown_id,
        "pad_token": _special(file, "padding_token_id", len(tokens)),
    }
    pre = file.get("tokenizer.ggml.pre", str, None)
    return Vocabulary(
        label=str(file.path),
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_scores(file, len(tokens)),
        unknown_id=unknown_id,
        add_space_prefix=file.get("tokenizer.ggml.add_space_prefix", bool, True),
        rstrip=model == "llama" and file.get("general.architecture", str, "") == "phi3",
        bos_id=bos_id,
        eos_ids=frozenset({i for i in (eos_id, eot_id, eom_id) if i is not None} | named),
        # Where the key is missing, older files count on what their tokenizer does by itself.
        add_bos=file.get(
            "tokenizer.ggml.add_bos_token", bool, model == "llama" or (model, pre) == ("gpt2", "llama-bpe")
        ),
        template=file.get("tokenizer.chat_template", str, None),
        names={name: tokens[i] for name, i in special_ids.items() if i is not None and tokens},
    )


def read_merges(file: GGUFFile) -> list[str]:
    """The BPE merges, best first; a vocabulary of bytes alone has none."""
    return _strings(file, "tokenizer.ggml.merges")


def _strings(file: GGUFFile, key: str) -> list[str]:
    items: list[str] = file.get(key, list, [])
    if items and not isinstance(items[0], str):
        raise ModelFormatError(f"{file.path}: metadata key {key!r} must hold strings")
    return items


def _types(file: GGUFFile, tokens: list[str], named: set[int | None] | None) -> list[int]:
    """named: for a SentencePiece vocabulary the ids of its special tokens, in case the file lists no types."""
    key, n_tokens = "tokenizer.ggml.token_type", len(tokens)
    types = file.get(key, np.ndarray, None)
    if types is None and named is not None:
        found = [TokenType.BYTE if BYTE_PIECE.fullmatch(token) else TokenType.NORMAL for token in tokens]
        return [TokenType.CONTROL if i in named else kind for i, kind in enumerate(found)]
    if types is None:
        return [TokenType.NORMAL] * n_tokens
    if len(types) != n_tokens or types.dtype.kind not in "iu":
        raise ModelFormatError(f"{file.path}: metadata key {key!r} must hold one integer for each of {n_tokens} tokens")
    return [int(kind) for kind in types]


def _scores(file: GGUFFile, n_tokens: int) -> npt.NDArray[np.float32] | None:
    key = "tokenizer.ggml.scores"
    scores = file.get(key, np.ndarray, None)
    if scores is None:
        return None
    if len(scores) != n_tokens or scores.dtype.kind not in "fiu":
        raise ModelFormatError(f"{file.path}: metadata key {key!r} must hold one number for each of {n_tokens} tokens")
    # A copy: the file's memory map must not stay open for it.
    return np.array(scores, np.float32)


def _special(file: GGUFFile, name: str, n_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    token_id: int | None = file.get(key, int, None)
    if token_id is None or token_id in (-1, _NONE_ID):
        return None
    limit = n_tokens or 2**31
    if not 0 <= token_id < limit:
        raise ModelFormatError(f"{file.path}: metadata key {key!r} is {token_id}; it must be below {limit}")
    return token_id
