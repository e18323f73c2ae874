"""How each pre-tokenizer cuts a text, by hand from its published pattern; and that an unknown one is never guessed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from miro_cy.errors import Unsupported
from miro_cy.text import Tokenizer
from miro_cy.text.bytelevel import PRE_TOKENIZERS, piece_bytes

Maker = Callable[..., Tokenizer]
DIGITS = {"gpt-2": ["12345"], "smollm": list("12345"), "qwen2": list("12345"), "llama-bpe": ["123", "45"]}
#: (text, its pieces; NUMBER stands for those of 12345)
CUTS: list[tuple[str, list[str]]] = [
    ("x12345", ["x", "NUMBER"]),
    ("x12345東京", ["x", "NUMBER", "東京"]),
    ("Hello world", ["Hello", " world"]),
    ("東京 大阪、é", ["東京", " 大阪", "、é"]),
    ("a   b", ["a", "  ", " b"]),
    ("a\u2029 b", ["a", "\u2029", " b"]),
    ("a\u2029\u2029b", ["a", "\u2029", "\u2029b"]),
    ("a\n\n b", ["a", "\n\n", " b"]),
    ("a  \n\n  b", ["a", "  \n\n", " ", " b"]),
    ("a \t ", ["a", " \t "]),
    ("x = y;\n\nz", ["x", " =", " y", ";\n\n", "z"]),
    ("we'll WE'LL", ["we", "'ll", " WE", "'LL"]),
    ("(a)", ["(a", ")"]),
    ("é\u0301x", ["é", "\u0301x"]),
    ("🚀🚀 🚀", ["🚀🚀", " 🚀"]),
]
#: Where GPT-2's pattern cuts differently: punctuation takes neither words nor line ends, capitals are no contraction.
GPT2: dict[str, list[str]] = {
    "東京 大阪、é": ["東京", " 大阪", "、", "é"],
    "a\u2029\u2029b": ["a", "\u2029", "\u2029", "b"],
    "a  \n\n  b": ["a", "  \n\n ", " b"],
    "x = y;\n\nz": ["x", " =", " y", ";", "\n", "\n", "z"],
    "we'll WE'LL": ["we", "'ll", " WE", "'", "LL"],
    "(a)": ["(", "a", ")"],
    "é\u0301x": ["é", "\u0301", "x"],
}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    cut = tokenizer._codec._bpe.pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
    return [piece_bytes(piece).decode() for piece, _ in cut]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_cuts_of_each_pre_tokenizer(make_tokenizer: Maker, pre: str) -> None:
    tokenizer = make_tokenizer(pre=pre)
    for text, cut in CUTS:
        if pre in ("gpt-2", "smollm"):
            cut = GPT2.get(text, cut)
        expected = [piece for part in cut for piece in (DIGITS[pre] if part == "NUMBER" else [part])]
        assert pieces(tokenizer, text) == expected, text
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_the_cuts_tell_the_pre_tokenizers_apart(make_tokenizer: Maker) -> None:
    cuts = {pre: [pieces(make_tokenizer(pre=pre), text) for text, _ in CUTS] for pre in PRE_TOKENIZERS}
    assert all(cuts[one] != cuts[other] for one in cuts for other in cuts if one != other)


@pytest.mark.parametrize("pre", ["", "default", "llama3", "deepseek-llm", "gpt2", "QWEN2", "llama-bpe ", "tekken"])
def test_an_unknown_pre_tokenizer_is_refused_by_name(make_tokenizer: Maker, pre: str) -> None:
    """Another one's pattern would answer, a little worse, and nobody would know why."""
    tokenizer = make_tokenizer(pre=pre)
    with pytest.raises(Unsupported, match=f"gpt2/{pre or r'.no pre-tokenizer.'}"):
        tokenizer.encode("hello")
