"""Minutes of sixteen clients against SmolLM2 in a pool too small for them: nothing wrong, lost or left behind."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_client import Client
from miro_cy import Engine, SamplingParams

SECONDS = float(os.environ.get("MIRO_SOAK_SECONDS", "180"))
STEADY, VANISHING = 12, 4
ASKS = 40
#: Of SmolLM2's 2,048 tokens. The pool holds one context and a little: a few short requests that grow fill it.
CONTEXT, BLOCK, BLOCKS = 384, 16, 28
ENGINE = {"max_context": CONTEXT, "block_size": BLOCK, "max_num_seqs": 16, "max_step_tokens": 256}
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, head size, fp16
ANSWER_S = 120
#: Memory that may come on top between the first third of the run and the last: allocators are not exact.
GROWTH_BYTES = 24 * 2**20
SAMPLE_S = 0.5

VICTIM = """
import sys
from miro_client import Client
client = Client(sys.argv[1], timeout=120)
streams = [client.generate(f"victim {i} says", max_tokens=200, temperature=0.9, ignore_eos=True) for i in range(3)]
print("streaming", flush=True)
for parts in zip(*streams):
    pass
print("done", flush=True)
"""


def make_ask(index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt and how it is answered: text, chat and token ids, 2 to some 200 tokens, 1 to 110 new ones."""
    draw = random.Random(index)
    words = ["ship", "lighthouse", "été", "counted", "the", "7", "blue", "whales", "and", "\n", "😀", "slowly"]
    text = " ".join(draw.choices(words, k=draw.choice([1, 5, 20, 60])))
    prompts: list[dict[str, Any]] = [
        {"prompt": text},
        {"messages": [{"role": "user", "content": text}]},
        {"tokens": draw.choices(range(100, 40_000), k=draw.randrange(1, 200))},
    ]
    sampling: dict[str, Any] = {"max_tokens": draw.choice([1, 8, 24, 60, 110]), "seed": index}
    sampling["temperature"] = draw.choice([0.0, 0.0, 0.7, 1.2])
    sampling |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"ignore_eos": True}, {"stop": ["the", "\n\n"]}])
    sampling |= draw.choice([{}, {"logprobs": 2}])
    sampling |= draw.choice([{}, {}, {"n": 3}, {"prompt_logprobs": 1}])
    return draw.choice(prompts), sampling


def whole(answer: Any) -> tuple[Any, ...]:
    return tuple(
        (one.text, list(one.tokens), one.logprobs, one.finish_reason, one.stop, one.prompt_logprobs)
        for one in answer.choices
    )


class Soak:
    """The clients, what they saw, and when to stop."""

    def __init__(self, endpoint: str, alone: list[tuple[Any, ...]]) -> None:
        self.endpoint, self.alone = endpoint, alone
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._guard, args=(self._steady, i)) for i in range(STEADY)]
        self._threads += [threading.Thread(target=self._guard, args=(self._vanishing, i)) for i in range(VANISHING)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        self.over.set()
        deadline = time.monotonic() + 2 * ANSWER_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"

    def _guard(self, run: Callable[[random.Random], None], index: int) -> None:
        try:
            run(random.Random(f"{run.__name__} {index}"))
        except Exception as error:
            self.problems.append(f"{run.__name__} {index}: {type(error).__name__}: {error}")

    def _steady(self, draw: random.Random) -> None:
        """Asks, cancels, and now and then comes back over a new connection."""
        while not self.over.is_set():
            with Client(self.endpoint, timeout=ANSWER_S) as client:
                self.counts["connections"] += 1
                for _ in range(draw.randrange(1, 6)):
                    if self.over.is_set():
                        return
                    self._ask(client, draw)

    def _ask(self, client: Client, draw: random.Random) -> None:
        index = draw.randrange(len(self.alone))
        prompt, sampling = make_ask(index)
        want = self.alone[index]
        if draw.random() < 0.2:
            self._compare(index, whole(client.complete(**prompt, **sampling)))
            return
        patience = draw.randrange(20) if draw.random() < 0.25 else None
        stream = client.generate(**prompt, **sampling)
        tokens: list[list[int]] = [[] for _ in want]
        for number, chunk in enumerate(stream):
            tokens[chunk.choice] += chunk.tokens
            begun, whole_of_it = tokens[chunk.choice], want[chunk.choice][1]
            if begun != whole_of_it[: len(begun)]:
                self.problems.append(f"ask {index}: {begun} are not how {whole_of_it} begins")
            if number == patience:
                stream.close()
                self.counts["cancelled"] += 1
                return
        self._compare(index, whole(stream.result))

    def _compare(self, index: int, got: tuple[Any, ...]) -> None:
        self.counts["answers"] += 1
        if got != self.alone[index]:
            self.problems.append(f"ask {index}: {got} instead of {self.alone[index]}")

    def _vanishing(self, draw: random.Random) -> None:
        """Processes that are killed in the middle of three answers."""
        while not self.over.is_set():
            command = [sys.executable, "-c", VICTIM, self.endpoint]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
                try:
                    assert victim.stdout is not None
                    assert victim.stdout.readline() == "streaming\n"
                    self.over.wait(draw.uniform(0, 8))
                finally:
                    victim.send_signal(signal.SIGKILL)
            self.counts["killed"] += victim.returncode == -signal.SIGKILL


@pytest.fixture
def alone(smollm2_path: Path) -> list[tuple[Any, ...]]:
    """Each ask's answer as the engine gives it alone, with settings and a pool of another size."""
    with Engine.load(smollm2_path, max_context=CONTEXT) as engine:
        answers = []
        for index in range(ASKS):
            prompt, sampling = make_ask(index)
            answers.append(whole(engine.generate(prompt.get("prompt", prompt), SamplingParams(**sampling))))
    assert len({tuple(tuple(tokens) for _, tokens, *_ in choices) for choices in answers}) > ASKS * 0.8
    return answers


@pytest.mark.timeout(SECONDS + 700)
def test_promises_hold_for_minutes(
    serve: Callable[..., Any], wait_for: Callable[..., None], smollm2_path: Path, alone: list[tuple[Any, ...]]
) -> None:
    pool = {"kv_memory": KV_BYTES_PER_TOKEN * BLOCK * BLOCKS}
    service = serve(smollm2_path, engine=ENGINE | pool, worker={})
    with Client(service.endpoint) as client:
        assert client.ping().free_blocks == BLOCKS
        client.complete("Once", max_tokens=2)  # whatever is made at the first request
    time.sleep(1)  # the connection's descriptor goes
    threads, descriptors = service.threads(), service.descriptors()

    resident: list[int] = []
    soak = Soak(service.endpoint, alone)
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until and not soak.problems and service.alive():
            resident.append(service.resident())
            time.sleep(SAMPLE_S)
    finally:
        soak.stop()
    assert not soak.problems, "\n".join(soak.problems[:10])
    assert service.alive(), service.errors()

    with Client(service.endpoint) as client:
        wait_for(lambda: client.ping().free_blocks == BLOCKS, lambda: f"the pool is not whole: {client.ping()}")
        pong = client.ping()
        assert (pong.running, pong.waiting) == (0, 0)
    wait_for(lambda: service.threads() <= threads, lambda: f"{service.threads()} threads, {threads} before")
    wait_for(
        lambda: service.descriptors() <= descriptors,
        lambda: f"{service.descriptors()} open files, {descriptors} before",
    )
    stats = service.stop()
    assert "Traceback" not in service.errors(), service.errors()

    third = len(resident) // 3
    early, late = statistics.median(resident[third // 2 : third]), statistics.median(resident[-third:])
    assert late - early < GROWTH_BYTES, f"{early / 2**20:.0f} MiB became {late / 2**20:.0f} MiB"
    assert stats["total_blocks"] == BLOCKS
    assert stats["preemptions"] > SECONDS / 60, stats
    assert soak.counts["answers"] > SECONDS / 4, soak.counts
    assert soak.counts["cancelled"] > SECONDS / 30, soak.counts
    assert soak.counts["killed"] >= VANISHING, soak.counts
    assert soak.counts["connections"] >= STEADY + SECONDS // 30, soak.counts
