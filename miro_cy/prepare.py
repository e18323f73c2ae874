"""From what a caller asks to a request that can run: token ids, every limit checked, the seed fixed. Any thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from miro_client.checks import shown
from miro_cy.errors import BadField, ContextOverflow, Unsupported
from miro_cy.requests import Prompt, Request
from miro_cy.sampling.params import SamplingParams
from miro_cy.text import Tokenizer

Tokens = NDArray[np.int32]

#: Real text has a quarter of this a token; only beyond it is the vocabulary searched for its longest.
COMMON_TOKEN_CHARS = 16


class Preparer:
    """Knows a model's vocabulary and limits.

    room: most tokens of a sequence. check(n_prompt, max_new): refuses what could never run. seed: where seeds of
    requests that name none come from (None: the operating system).
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, room: int, check: Callable[[int, int], None], seed: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._room = room
        self._check = check
        self._longest: int | None = None
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request whose prompt is {"tokens": int32 array} and whose seed is fixed.

        Raises BadField, ContextOverflow, Unschedulable or Unsupported.
        """
        if not isinstance(params, SamplingParams):
            raise BadField(f"params must be SamplingParams, not {type(params).__name__}", field="params")
        for token in params.stop_token_ids:
            if token >= self._vocab_size:
                raise BadField(f"stop_token_ids: {token} is not below {self._vocab_size}", field="stop_token_ids")
        if params.stop and not self._tokenizer.supported:
            raise Unsupported(f"stop strings need a tokenizer; this model has {self._tokenizer.kind}", field="stop")
        if params.beam_width > self._vocab_size:
            raise BadField(
                f"beam_width {params.beam_width} is above the vocabulary of {self._vocab_size}", field="beam_width"
            )
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(64))
        request = Request({"tokens": self.prompt_ids(prompt)}, params)
        self._check(len(prompt_tokens(request)), self.max_new(request))
        return request

    def max_new(self, request: Request) -> int:
        """max_tokens of a prepared request, or what is left of the context and the pool."""
        if request.params.max_tokens is not None:
            return request.params.max_tokens
        n_prompt = len(prompt_tokens(request))
        if n_prompt >= self._room:
            raise ContextOverflow(
                f"the prompt has {n_prompt} tokens and leaves no room in a context of {self._room}", field="prompt"
            )
        return self._room - n_prompt

    def prompt_ids(self, prompt: Prompt) -> Tokens:
        """Token ids of any kind of prompt."""
        if isinstance(prompt, str):
            return self._encode(prompt, add_special=True)
        if not isinstance(prompt, Mapping) or len(prompt) != 1:
            raise BadField('a prompt is text, {"messages": [...]} or {"tokens": [...]}', field="prompt")
        if "tokens" in prompt:
            return self.token_ids(prompt["tokens"])
        if "messages" in prompt:
            return self._encode(self._tokenizer.render(prompt["messages"]), add_special=False)
        raise BadField(f"unknown kind of prompt {shown(next(iter(prompt)))}", field="prompt")

    def _encode(self, text: str, *, add_special: bool) -> Tokens:
        """Tokenise, unless the text is so long that it cannot fit however it is cut."""
        if len(text) > COMMON_TOKEN_CHARS * self._room and len(text) > self._longest_token() * self._room:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters, too many for a context of {self._room} tokens", field="prompt"
            )
        return np.asarray(self._tokenizer.encode(text, add_special=add_special), np.int32)

    def _longest_token(self) -> int:
        """Most characters a token of the vocabulary stands for."""
        if self._longest is None and self._tokenizer.supported:
            sizes = (len(self._tokenizer.token_bytes(i, skip_special=False)) for i in range(self._tokenizer.vocab_size))
            self._longest = max(sizes, default=1)
        return self._longest or COMMON_TOKEN_CHARS

    def token_ids(self, tokens: object) -> Tokens:
        """int32 ids of any iterable of integers inside the vocabulary."""
        if not isinstance(tokens, Iterable) or isinstance(tokens, (str, bytes, Mapping)):
            raise BadField("tokens must be a list of integers", field="tokens")
        try:
            if not isinstance(tokens, (np.ndarray, Sequence)):
                # One too many is enough to be refused; endless ones end here.
                tokens = list(islice(tokens, self._room + 1))
            ids = tokens if isinstance(tokens, np.ndarray) else np.asarray(list(tokens))
        except Exception as problem:  # lists of different lengths, or whatever an __iter__ of somebody else's raises
            raise BadField("tokens must be a list of integers", field="tokens") from problem
        if ids.ndim != 1:
            raise BadField("tokens must be a list of integers", field="tokens")
        if len(ids) and not np.issubdtype(ids.dtype, np.integer):
            raise BadField("tokens must be integers", field="tokens")
        if len(ids) and not (ids.min() >= 0 and ids.max() < self._vocab_size):
            bad = next(int(i) for i in ids if not 0 <= i < self._vocab_size)
            raise BadField(f"token id {bad} is not in the vocabulary of {self._vocab_size}", field="tokens")
        return np.ascontiguousarray(ids, np.int32)


def prompt_tokens(request: Request) -> Tokens:
    """Token ids of a prepared request."""
    return cast("Tokens", cast("Mapping[str, Any]", request.prompt)["tokens"])
