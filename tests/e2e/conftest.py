"""A tiny model with a tokenizer, asked in this process or through a worker and its client."""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miro_client import Client
from miro_cy import Engine, SamplingParams
from miro_worker import Worker, WorkerConfig

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "worker"))
_engine_tests = runpy.run_path(str(TESTS / "engine" / "conftest.py"))
load, text_model, golden = (_engine_tests[name] for name in ("load", "text_model", "golden"))
Speaker = _engine_tests["Speaker"]
DEADLINE_S = 30.0


@pytest.fixture
def served() -> Iterator[Callable[[Engine], str]]:
    """Serves an engine until the test ends; gives the endpoint, the same for the same engine."""
    folder = Path(tempfile.mkdtemp(prefix="miro-"))  # a short path: the names of Unix sockets are limited
    workers: dict[Engine, Worker] = {}

    def serve(engine: Engine) -> str:
        if engine not in workers:
            endpoint = f"ipc://{folder}/{len(workers)}.sock"
            workers[engine] = Worker(engine, endpoint, config=WorkerConfig(grace_ms=100)).start()
        return workers[engine].endpoint

    yield serve
    for worker in workers.values():
        assert worker.stop(0)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["engine", "worker"])
def ask(request: pytest.FixtureRequest, served: Callable[[Engine], str]) -> Callable[..., Any]:
    """ask(engine, prompt, **sampling): the answer, whole and streamed alike, in this process or over a socket."""

    def in_process(engine: Engine, prompt: Any, **sampling: Any) -> Any:
        params = SamplingParams(**sampling)
        whole = engine.generate(prompt, params)
        events = list(engine.stream(prompt, params))
        assert next((e.prompt_logprobs for e in events if e.prompt_logprobs), None) == whole.prompt_logprobs
        for i, choice in enumerate(whole.choices):
            mine = [event for event in events if event.choice == i]
            check(choice, mine[-1], mine)
        return plain(whole)

    def over_a_socket(engine: Engine, prompt: Any, **sampling: Any) -> Any:
        kind = {"prompt": prompt} if isinstance(prompt, str) else prompt
        with Client(served(engine), timeout=DEADLINE_S) as client:
            whole = client.complete(**kind, **sampling)
            stream = client.generate(**kind, **sampling)
            chunks = list(stream)
        assert stream.result.prompt_logprobs == whole.prompt_logprobs
        for i, (choice, streamed) in enumerate(zip(whole.choices, stream.result.choices, strict=True)):
            check(choice, streamed, [chunk for chunk in chunks if chunk.choice == i])
        return plain(whole)

    def check(whole: Any, last: Any, pieces: list[Any]) -> None:
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.tokens] == list(whole.tokens)
        assert (last.finish_reason, last.stop) == (whole.finish_reason, whole.stop)
        assert last.usage.cached_tokens >= whole.usage.cached_tokens, "asked again, it finds its own prompt"
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert whole.usage.completion_tokens == len(whole.tokens)

    def plain(whole: Any) -> Any:
        whole.tokens = list(whole.tokens)
        return whole

    return in_process if request.param == "engine" else over_a_socket


@pytest.fixture
def speaker(load: Callable[..., Engine], text_model: Path) -> Any:
    """An engine that says what it is told to."""
    return Speaker(load(text_model, threads=1))
