"""Values that each field of SamplingParams refuses; for tests of the engine and, as far as they travel, the wire."""

from decimal import Decimal
from typing import Any

import numpy as np

from miro_client.checks import MAX_INT32
from miro_cy.sampling.params import (
    MAX_BEAM_WIDTH,
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_SALT_BYTES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_UINT64,
)

HUGE = 10**5000  # more digits than Python agrees to write
NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "n": [0, -1, MAX_CHOICES + 1, HUGE, 1.0, NAN, "1", b"1", True, None, [1], {}, int],
    "max_tokens": [-1, MAX_INT32 + 1, HUGE, 1.0, "8", True, [1], {}, NAN, INF, int, np.array([1, 2])],
    "temperature": [
        -0.1, 2.0001, HUGE, NAN, INF, -INF, "1", b"1", True, None, [1.0], {}, 1j, float, np.array([1.0, 1.0]),
        Decimal("NaN"),
    ],
    "top_k": [-2, MAX_INT32 + 1, HUGE, 1.5, NAN, "1", None, False, [], int],
    "top_p": [0, 0.0, -0.5, 1.0001, HUGE, NAN, INF, "0.5", None, True, [0.5], {}],
    "seed": [-2, MAX_UINT64 + 1, HUGE, 0.5, NAN, "1", True, [], b"1"],
    "stop": [
        "", [""], ["a", ""], ["a"] * (MAX_STOPS + 1), ["a"] * 5000, "x" * (MAX_STOP_BYTES + 1),
        "é" * (MAX_STOP_BYTES // 2 + 1), "\ud800", ["ok", 1], [b"x"], b"x", 1, NAN, True, {"a": 1}, [None], [["a"]],
        [HUGE],
    ],
    "stop_token_ids": [
        [-1], [MAX_INT32 + 1], [HUGE], [1.0], [NAN], ["1"], [True], [[1]], "12", b"12", 3, NAN, False, {1: 2},
        list(range(MAX_STOPS + 1)), [1] * 5000,
    ],
    "ignore_eos": [0, 1, NAN, "true", None, [], HUGE],
    "logprobs": [-1, MAX_LOGPROBS + 1, HUGE, 1.0, NAN, "1", True, [1]],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 2**70, -(2**70), HUGE, 1.0, NAN, "1", b"1", True, False, [1], {}, int],
    "cache_salt": [
        "", "x" * (MAX_SALT_BYTES + 1), "é" * (MAX_SALT_BYTES // 2 + 1), "\ud800", 1, b"x", True, ["x"], NAN, HUGE,
    ],
    "beam_width": [0, -1, MAX_BEAM_WIDTH + 1, HUGE, 2.0, NAN, "2", True, None, [2], int],
    "length_penalty": [
        MAX_LENGTH_PENALTY + 0.001, -MAX_LENGTH_PENALTY - 0.001, HUGE, NAN, INF, -INF, "1", b"1", True, None, [1.0], {},
    ],
    "early_stopping": [0, 1, NAN, None, "true", "Never", "", b"never", [], ["never"], np.array(["never"]), HUGE],
}  # fmt: skip
