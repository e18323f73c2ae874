"""Log-probabilities of a prompt's tokens, put together from the logits rows of its chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miro_cy.requests import TokenLogprob
from miro_cy.sampling.sampler import score_rows


class PromptScores:
    """Takes the logits row after each token of a prompt, in order; each row scores the token that follows.

    tokens: int32 [n]. top: most likely alternatives reported with each (0 to 128).
    entries: one a token so far, at most n; the first is None, since nothing comes before it.
    """

    def __init__(self, tokens: NDArray[np.int32], top: int) -> None:
        self.entries: list[TokenLogprob | None] = [None]
        self._tokens = tokens
        self._top = top
        self._n_rows = 0

    @property
    def done(self) -> bool:
        """Whether the row after the last token has come, too: there are n entries."""
        return self._n_rows == len(self._tokens)

    def take(self, rows: NDArray[np.float32]) -> int | None:
        """Score with the next rows, float32 [m, vocab]; the position of one that has no finite maximum, if any."""
        self._n_rows += len(rows)
        wanted = self._tokens[len(self.entries) : self._n_rows + 1]
        scored = score_rows(rows, wanted, self._top)
        self.entries += [TokenLogprob(*entry) for entry in scored]
        return None if len(scored) == len(wanted) else len(self.entries)
