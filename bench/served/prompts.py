"""Prompts of random words, in the token ids of a model, so that two systems get exactly the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from miro_cy.loading import tokenizer_of
from miro_cy.model.opening import open_checkpoint

WORDS = (
    *("anchor", "basket", "candle", "desert", "echo", "fabric", "glacier", "harbour", "island", "jacket", "kettle"),
    *("lantern", "meadow", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "thunder", "umbrella"),
    *("valley", "whistle", "yellow"),
)
Ids = list[int]


class Prompts:
    """Prompts that begin alike only by chance. encode: ids of a text, perhaps with a first special one."""

    def __init__(self, encode: Callable[[str], Sequence[int]], seed: int = 0) -> None:
        self._encode = encode
        self._rng = random.Random(seed)

    @classmethod
    def of_model(cls, path: Path, seed: int = 0) -> Prompts:
        """In the ids of a checkpoint. Raises as loading does."""
        with open_checkpoint(path) as checkpoint:
            return cls(tokenizer_of(checkpoint).encode, seed)

    def words(self, n: int) -> Ids:
        """A prompt of n words."""
        return list(self._encode(" ".join(self._rng.choices(WORDS, k=n))))

    def sharing(self, n: int, prefix: int, words: int, block: int) -> tuple[list[Ids], int]:
        """n prompts with a common beginning of `prefix` words and `words` more each; and how many tokens, in full
        blocks, any of them can take from any other.
        """
        while True:
            beginning = self.words(prefix)
            prompts = [beginning + self.words(words) for _ in range(n)]
            shares = {common(a, b) // block for i, a in enumerate(prompts) for b in prompts[:i]}
            if len(shares) == 1:  # else two of them happen to begin alike for a block more than others
                return prompts, block * shares.pop()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two prompts begin with in common. The last one of a prompt does not count: it is always computed."""
    most = min(len(a), len(b)) - 1
    return next((i for i in range(most) if a[i] != b[i]), most)
