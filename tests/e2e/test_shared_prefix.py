"""Clients with one long prompt in common, and a word of their own each: what is shared is the beginning, no more."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_client import Client
from miro_cy import Engine, SamplingParams

SYSTEM = "You are a lighthouse keeper and answer in ships. " * 3
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}


def prompt_of(i: int) -> str:
    return f"{SYSTEM}Word {i * 7919 % 1000:03d}"


def scored(tokens: list[int], logprobs: Any) -> tuple[Any, ...]:
    """Tokens and their log-probabilities, which tell any two prompts apart."""
    return (*tokens, *(item.logprob for item in logprobs))


@pytest.fixture
def expected(load: Callable[..., Engine], text_model: Path) -> list[tuple[Any, ...]]:
    """The answer to each prompt, from an engine that keeps nothing."""
    engine = load(text_model, threads=1, prefix_cache=False)
    answers = engine.generate([prompt_of(i) for i in range(64)], SamplingParams(**GREEDY))
    found = [scored(answer.tokens, answer.logprobs) for answer in answers]
    assert len(set(found)) == 64
    return found


@pytest.mark.parametrize("kv_blocks", [24, 400])
def test_sixty_four_clients_and_cancels_each_get_their_own(
    load: Callable[..., Engine], text_model: Path, served: Any, expected: list[tuple[Any, ...]], kv_blocks: int
) -> None:
    """Under load, with a pool that is too small for all or roomy, and a third of them cancelled at random moments."""
    block = load(text_model, threads=1)._parts.spec.kv_bytes_per_token("fp32") * 16
    engine = load(text_model, threads=1, block_size=16, kv_memory=kv_blocks * block, max_num_seqs=16)
    draw = random.Random(kv_blocks)
    with Client(served(engine), timeout=60) as client:
        for _ in range(2):
            streams = {i: client.generate(prompt_of(i), **GREEDY) for i in range(64)}
            cancelled = set(draw.sample(range(64), 21))
            for i in draw.sample(range(64), 64):
                if i in cancelled:
                    for _ in range(draw.randrange(3)):
                        next(streams[i], None)
                    streams[i].close()
                else:
                    for _ in streams[i]:
                        pass
                    result = streams[i].result
                    assert scored(result.tokens, result.logprobs) == expected[i], f"client {i}"
                    assert result.usage.cached_tokens % 16 == 0
    engine.check_integrity()
    assert engine.stats()["cached_tokens"] > 64 * 96


def test_usage_tells_to_the_token_what_was_cached(load: Callable[..., Engine], text_model: Path, served: Any) -> None:
    """One after another: the first computes everything, each later one its own word and what shares its block."""
    engine = load(text_model, threads=1, block_size=16)
    n_shared = len(engine.tokenize(f"{SYSTEM}Word "))
    with Client(served(engine), timeout=60) as client:
        cached = [client.complete(prompt_of(i), **GREEDY).usage.cached_tokens for i in range(5)]
        assert cached == [0] + [n_shared // 16 * 16] * 4
        again = client.complete(prompt_of(3), **GREEDY).usage
        assert again.cached_tokens == (again.prompt_tokens - 1) // 16 * 16
        apart = client.complete(prompt_of(3), cache_salt="mine", **GREEDY).usage
        assert apart.cached_tokens == 0
        stats = client.stats()
        assert stats.cached_tokens == sum(cached) + again.cached_tokens
        assert stats.cached_blocks > 0
        assert client.ping().free_blocks == stats.total_blocks
