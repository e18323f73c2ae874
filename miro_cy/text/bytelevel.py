"""Byte-level BPE from a GGUF vocabulary (Radford et al., 2019), built with the `tokenizers` library.

Byte-level vocabularies write every byte as one printable character; `BYTES` maps those characters back.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from miro_cy.errors import BadField, ModelFormatError
from miro_cy.text.codec import SplittingCodec, encode_released
from miro_cy.text.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    import tokenizers

# How the two newer pre-tokenizers cut a text (Llama 3, Qwen 2): contractions, words with what joins them, digits (runs
# of three, or one by one), punctuation with the line ends after it, white space. NUMBER stands for the difference.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama-bpe": _WORDS.replace("NUMBER", r"\p{N}{1,3}"),
    "qwen2": _WORDS.replace("NUMBER", r"\p{N}"),
}
#: Pre-tokenizers (`tokenizer.ggml.pre`) that are implemented. A wrong one degrades answers unseen, hence no default.
PRE_TOKENIZERS = ("gpt-2", "smollm", *_PATTERNS)


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


def missing_bytes(vocab: Container[str]) -> frozenset[int]:
    """The bytes that are no entry of a vocabulary."""
    return frozenset(byte for char, byte in BYTES.items() if char not in vocab)


def check_bytes(text: str, missing: frozenset[int]) -> None:
    """Raises BadField when the UTF-8 of `text` has one of the bytes that the vocabulary lacks.

    The library would drop them without a word.
    """
    if missing and not missing.isdisjoint(text.encode()):
        lost = next(char for char in text if not missing.isdisjoint(char.encode()))
        raise BadField(f"the model's vocabulary has no token for the character U+{ord(lost):04X}", field="prompt")


class ByteLevelBPE(SplittingCodec):
    """The codec of a GGUF file whose tokenizer model is "gpt2".

    Raises ModelFormatError when the merges do not fit the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str]) -> None:
        super().__init__(vocabulary.specials())
        self._types = vocabulary.types
        self.vocab_size = len(vocabulary.tokens)
        vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
        # What the library does not keep: of a token that is there twice it knows the first id.
        self._repeated: dict[int, str] = {}
        if len(vocab) < self.vocab_size:
            vocab = {}
            for token_id, token in enumerate(vocabulary.tokens):
                if vocab.setdefault(token, token_id) != token_id:
                    self._repeated[token_id] = token
        self._bpe = _build(vocab, merges, vocabulary.pre or "", vocabulary.label)
        self._missing = missing_bytes(vocab)

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        check_bytes(text, self._missing)
        return encode_released(self._bpe, text)

    def piece(self, index: int) -> bytes:
        kind = self._types[index]
        if kind == TokenType.UNUSED:
            return b""
        token = self._repeated.get(index) or self._bpe.id_to_token(index) or ""
        literal = kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        return token.encode() if literal else piece_bytes(token)


def _check_merges(merges: Sequence[str], vocab: dict[str, int], label: str) -> None:
    """Raises ModelFormatError naming the first merge that does not fit, if there is one."""
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFormatError(f"{label}: merge {i} ({merge!r:.80}) does not fit the vocabulary")


def _build(vocab: dict[str, int], merges: Sequence[str], pre: str, label: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pairs = [merge.partition(" ")[::2] for merge in merges]
    # The library refuses what is not in the vocabulary, but a whole longer than all tokens makes it panic; and with an
    # empty token, a merge without a space would be one with an empty half.
    if "" in vocab or not all(merge.replace(" ", "", 1) in vocab for merge in merges):
        _check_merges(merges, vocab, label)
    try:
        # Llama 3 takes a piece that is a token as it is, whatever its merges would make of it.
        bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception, without saying which merge it does not like
        _check_merges(merges, vocab, label)
        raise ModelFormatError(f"{label}: the BPE vocabulary is unusable: {error}") from None
    pattern = _PATTERNS.get(pre)
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    ]
    if pattern is not None:
        splits.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    elif pre == "smollm":  # GPT-2's pattern, once every digit is a piece of its own
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return bpe
