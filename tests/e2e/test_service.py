"""The whole path with the real model: clients, sockets, worker, engine."""

import time

import pytest

from miro_client import Client
from miro_cy import Engine, SamplingParams
from miro_worker import Worker

DEADLINE_S = 120


@pytest.fixture(scope="module")
def engine(smollm2_path):
    with Engine.load(smollm2_path, max_context=2304, max_num_seqs=12) as engine:
        yield engine


@pytest.fixture
def worker(engine, tmp_path):
    worker = Worker(engine, f"ipc://{tmp_path}/miro.sock")
    worker.start()
    yield worker
    assert worker.stop(grace_ms=0)


def settle(engine):
    deadline = time.monotonic() + DEADLINE_S
    while engine.has_work or engine.stats()["running"]:
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.02)
    engine.check_integrity()


def ask(i):
    """Prompt and sampling of client i: greedy and sampled, short and long, text and chat."""
    story = "The old lighthouse keeper counted ships. " * (i % 5) + f"On day {i} he saw"
    prompt = {"messages": [{"role": "user", "content": story}]} if i % 3 == 0 else {"prompt": story}
    sampling = {"max_tokens": 12 + i, "temperature": 0.0 if i % 2 else 0.8, "top_p": 0.95, "seed": i}
    return prompt, sampling


def test_a_client_gets_what_the_engine_gives(engine, worker):
    prompt, sampling = ask(4)
    with Client(worker.endpoint, timeout=DEADLINE_S) as client:
        remote = client.complete(**prompt, **sampling, logprobs=3)
    settle(engine)
    tokens, logprobs = [], []
    request = engine.add(engine.prepare(prompt["prompt"], SamplingParams(**sampling, logprobs=3)))
    while engine.has_work:
        for event in engine.step():
            assert event.request_id == request
            tokens += event.tokens
            logprobs += event.logprobs or []
    assert list(remote.tokens) == tokens
    assert [p.logprob for p in remote.logprobs] == [p.logprob for p in logprobs]


def test_promise_nothing_stalls_ping_during_a_long_prefill(engine, worker):
    """Promise 5: nothing stalls anyone else. The limit is generous; bench/ measures the figure."""
    with Client(worker.endpoint, timeout=DEADLINE_S) as busy, Client(worker.endpoint, timeout=DEADLINE_S) as other:
        stream = busy.generate(tokens=[5] * 2000, max_tokens=1)
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            other.ping()
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.02)
        list(stream)
    assert slowest < 1.0
    settle(engine)
