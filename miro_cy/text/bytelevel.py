"""Byte-level BPE from a GGUF vocabulary (Radford et al., 2019), built with the `tokenizers` library.

Byte-level vocabularies write every byte as one printable character; `BYTES` maps those characters back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from miro_cy.errors import BadField, ModelFormatError

if TYPE_CHECKING:
    import tokenizers

#: Pre-tokenizers (`tokenizer.ggml.pre`) that are implemented. A wrong one degrades answers unseen, hence no default.
PRE_TOKENIZERS = ("gpt-2", "smollm")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES: dict[str, int] = _byte_alphabet()


def piece_bytes(token: str) -> bytes:
    """The bytes a vocabulary entry stands for; a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTES[char] for char in token])
    except KeyError:
        return b"".join(bytes([BYTES[char]]) if char in BYTES else char.encode() for char in token)


class ByteLevelBPE:
    """Plain text (no special tokens) to ids.

    Raises ModelFormatError when the merges do not fit the vocabulary.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: str, label: str) -> None:
        vocab: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            vocab.setdefault(token, token_id)
        self._bpe = _build(vocab, _pairs(merges, vocab, label), pre, label)
        missing = bytes(byte for char, byte in BYTES.items() if char not in vocab)
        self._missing = frozenset(missing)

    def encode(self, text: str, data: bytes) -> list[int]:
        """Token ids of `text`, whose UTF-8 is `data`.

        Raises BadField for a character that the vocabulary cannot express (byte-level vocabularies may lack rare bytes;
        the library would drop them without a word).
        """
        if self._missing and not self._missing.isdisjoint(data):
            lost = next(char for char in text if not self._missing.isdisjoint(char.encode()))
            raise BadField(f"the model's vocabulary has no token for the character U+{ord(lost):04X}", field="prompt")
        # As a batch of one: the library holds the GIL in `encode`, and a long text would stall every other thread.
        ids: list[int] = self._bpe.encode_batch([text], add_special_tokens=False)[0].ids
        return ids


def _pairs(merges: Sequence[str], vocab: dict[str, int], label: str) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFormatError(f"{label}: merge {i} ({merge!r:.80}) does not fit the vocabulary")
        pairs.append((left, right))
    return pairs


def _build(vocab: dict[str, int], pairs: list[tuple[str, str]], pre: str, label: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    try:
        bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"{label}: the BPE vocabulary is unusable: {error}") from None
    # Both split by GPT-2's pattern; smollm first makes every digit a piece of its own.
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre == "smollm":
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return bpe
