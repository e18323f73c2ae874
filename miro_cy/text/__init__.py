"""Text on both ends of the model: chat template and tokens on the way in, streamed text on the way out."""

from __future__ import annotations

from miro_cy.text.stream import TextStream
from miro_cy.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]
