"""The client against a worker with a fake engine, over real sockets: answers, refusals, cancellation."""

from __future__ import annotations

import gc
import threading
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
from fake_engine import answer, ids_of, scores
from raw_client import DEADLINE_S, wait_until

from miro_client import Client, call, wire
from miro_client.errors import (
    BadField,
    ConfigError,
    ConnectionLost,
    ContextOverflow,
    InternalError,
    QueueFull,
    RequestTimeout,
    SlowClient,
    TooLarge,
)
from miro_client.results import Chunk, TokenLogprob, Usage

HUGE = 10**5000
CYCLE: list = []
CYCLE.append(CYCLE)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


def test_a_stream_and_its_result(worker, connect):
    stream = connect(worker.endpoint).generate("hello", max_tokens=6, seed=5, logprobs=1, temperature=np.float32(0.5))
    with pytest.raises(ConnectionLost):
        _ = stream.result
    chunks = list(stream)
    text, tokens = answer(ids_of("hello"), 6)
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token for chunk in chunks for token in chunk.tokens] == tokens
    assert [entry for chunk in chunks for entry in chunk.logprobs] == [
        TokenLogprob(-0.5, [(token, -0.5)]) for token in tokens
    ]
    result = stream.result
    assert (result.text, result.tokens, result.finish_reason) == (text, tokens, "length")
    assert result.usage == Usage(5, 0, 6)
    assert (result.prompt_tokens, result.seed, result.fingerprint) == (ids_of("hello"), 5, "fake/1")
    assert stream.prompt_tokens == ids_of("hello")
    assert result.timing.decode_ms == 3.0
    assert list(stream) == []


def test_a_whole_answer(worker, connect):
    client = connect(worker.endpoint)
    streamed = client.generate("hello", max_tokens=3, logprobs=1)
    list(streamed)
    whole = client.complete("hello", max_tokens=3, logprobs=1)
    whole.timing = whole.choices[0].timing = streamed.result.timing
    assert whole == streamed.result


def test_log_probabilities_of_the_prompt(worker, connect):
    client = connect(worker.endpoint)
    expected = scores(ids_of("hello"), 2)
    assert client.complete("hello", max_tokens=3, prompt_logprobs=2).prompt_logprobs == expected
    assert client.complete("hello", max_tokens=0, prompt_logprobs=2).prompt_logprobs == expected
    assert client.complete("hello", max_tokens=3, logprobs=2).prompt_logprobs is None
    stream = client.generate("hello", max_tokens=3, prompt_logprobs=np.int64(2))
    assert len(list(stream)) <= 3
    assert stream.result.prompt_logprobs == expected
    assert isinstance(stream.result.prompt_logprobs[1], TokenLogprob)
    for bad in (-1, 129, 2**70, True, "2", [2], 1.5):
        with pytest.raises(BadField) as caught:
            client.complete("hello", prompt_logprobs=bad)
        assert caught.value.field == "prompt_logprobs"


def test_tokens_and_messages(worker, connect):
    client = connect(worker.endpoint)
    assert client.complete(tokens=np.array([3, 4]), max_tokens=2).text == answer([3, 4], 2)[0]
    messages = [{"role": "user", "content": "x"}]
    assert client.complete(messages=messages, max_tokens=2).prompt_tokens == ids_of("user:x\n")


def test_streams_of_one_client_run_side_by_side(worker, connect):
    client = connect(worker.endpoint)
    streams = [client.generate(f"s{i}", max_tokens=20 + i) for i in range(5)]
    texts = [""] * 5
    live = set(range(5))
    while live:
        for i in sorted(live):
            chunk = next(streams[i], None)
            if chunk is None:
                live.discard(i)
            else:
                texts[i] += chunk.text
        client.ping()
    assert texts == [answer(ids_of(f"s{i}"), 20 + i)[0] for i in range(5)]


def test_one_client_in_many_threads(worker, connect):
    client = connect(worker.endpoint)
    results = {}

    def work(number: int) -> None:
        for round_ in range(5):
            results[number, round_] = client.complete(f"{number}/{round_}", max_tokens=4).text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == {(i, r): answer(ids_of(f"{i}/{r}"), 4)[0] for i in range(8) for r in range(5)}


@pytest.mark.parametrize("end", ["close", "with", "drop", "break", "cycle", "client"])
def test_an_abandoned_iterator_cancels(worker, connect, engine, end):
    engine.step_seconds = 0.002
    client = connect(worker.endpoint)
    stream = client.generate("abc", max_tokens=4000)
    next(stream)
    assert engine.has_work
    if end == "close":
        stream.close()
        stream.close()
        assert next(stream, None) is None
    elif end == "with":
        with stream:
            pass
    elif end == "break":
        for _ in stream:
            break
        del stream
    elif end == "cycle":
        loop = [stream]
        loop.append(loop)
        del stream, loop
        gc.collect()
    elif end == "drop":
        del stream
    else:
        client.close()
        with pytest.raises(ConnectionLost):
            list(stream)
    wait_until(lambda: not engine.has_work, "the worker stopped")
    if end != "client":
        assert client.complete("x", max_tokens=1).finish_reason == "length"


def test_a_client_that_is_held_only_by_its_stream_stays_open(worker):
    chunks = [chunk for chunk in Client(worker.endpoint).generate("abc", max_tokens=5)]  # noqa: C416
    assert "".join(chunk.text for chunk in chunks) == answer(ids_of("abc"), 5)[0]


def test_refusals_are_typed(worker, connect, engine):
    client = connect(worker.endpoint)
    with pytest.raises(ContextOverflow) as caught:
        client.complete("abc", max_tokens=5000)
    assert caught.value.field == "max_tokens"
    with pytest.raises(BadField) as caught:
        list(client.generate("abc", temperature=7))
    assert caught.value.field == "temperature"
    with pytest.raises(BadField) as caught:
        client.complete("abc", colour="red")
    assert caught.value.field == "colour"
    engine.add_errors.append(QueueFull("full", retry_after_ms=77))
    with pytest.raises(QueueFull) as caught:
        next(client.generate("abc"))
    assert caught.value.retry_after_ms == 77
    engine.step_errors.append(RuntimeError("broken"))
    with pytest.raises(InternalError):
        list(client.generate("abc"))
    assert client.complete("abc", max_tokens=1).finish_reason == "length"


def test_mistakes_are_found_before_anything_is_sent(connect, endpoint):
    client = connect(endpoint)  # there is no worker
    for arguments in (
        {},
        {"prompt": "a", "tokens": [1]},
        {"tokens": [2**40]},
        {"messages": [{"who": "x"}]},
        {"prompt": "\ud800"},
        {"prompt": "a", "stop": object()},
    ):
        with pytest.raises(BadField):
            client.generate(**arguments)
    with pytest.raises(TooLarge):
        client.generate("a" * wire.MAX_MESSAGE_BYTES)
    with pytest.raises(ConfigError):
        Client("nonsense")


@pytest.mark.parametrize(
    "timeout",
    ["a", -1, float("nan"), float("inf"), 1e300, [1], HUGE, Fraction(-1, 3), CYCLE],
    ids=lambda value: type(value).__name__,
)
def test_timeouts_that_cannot_be_waited_for(worker, connect, engine, timeout):
    client = connect(worker.endpoint)
    for use in (
        lambda: Client(worker.endpoint, timeout=timeout),
        lambda: client.generate("a", timeout=timeout),
        lambda: client.complete("a", timeout=timeout),
        lambda: client.ping(timeout),
        lambda: client.hello(timeout),
    ):
        with pytest.raises(BadField) as caught:
            use()
        assert caught.value.field == "timeout"
    assert not engine.prepared


@pytest.mark.parametrize("kind", [np.float32, np.int64, Fraction, int])
def test_timeouts_of_any_kind_of_number(worker, connect, kind):
    client = connect(worker.endpoint)
    timeout = kind(DEADLINE_S)
    assert list(client.generate("a", max_tokens=1, timeout=timeout))
    assert client.ping(timeout).epoch == client.hello(timeout).epoch
    with Client(worker.endpoint, timeout=timeout) as other:
        assert other.complete("a", max_tokens=1).finish_reason == "length"


def test_a_timeout_cancels(worker, connect, engine):
    client = connect(worker.endpoint)
    engine.gate.clear()
    with pytest.raises(RequestTimeout):
        client.complete("abc", timeout=0.05)
    with pytest.raises(TimeoutError):
        list(client.generate("abc", timeout=0.05))
    engine.gate.set()
    wait_until(lambda: not engine.has_work, "both were cancelled")
    assert client.complete("abc", max_tokens=1).finish_reason == "length"


def test_hello_and_ping(worker, connect, engine):
    client = connect(worker.endpoint)
    welcome = client.hello()
    assert (welcome.model, welcome.context, welcome.fingerprint) == ("fake", engine.context, engine.fingerprint)
    pong = client.ping()
    assert (pong.epoch, pong.running, pong.live) == (welcome.epoch, 0, [])


def test_an_answer_closed_while_another_thread_waits_for_it_ends_there(worker, connect, engine):
    engine.gate.clear()
    client = connect(worker.endpoint)
    stream = client.generate("abc", max_tokens=4)
    chunks = []
    thread = threading.Thread(target=lambda: chunks.extend(stream))
    thread.start()
    wait_until(lambda: engine.has_work, "the request is there")
    stream.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert chunks == []


def test_an_answer_that_nobody_reads_is_cancelled_at_its_limit(worker, connect, engine, monkeypatch):
    monkeypatch.setattr(call, "MAX_WAITING_BYTES", 50 * call.OVERHEAD_BYTES)
    engine.step_seconds = 0.001
    client = connect(worker.endpoint)
    stream = client.generate("abc", max_tokens=4000)
    wait_until(lambda: engine.has_work, "it has begun")
    wait_until(lambda: not engine.has_work, "it was cancelled")
    taken: deque[Chunk] = deque()
    with pytest.raises(SlowClient):
        taken.extend(stream)
    assert 20 < sum(len(chunk.tokens) for chunk in taken) <= 50  # what came before that is not withheld


def test_only_what_waits_counts_towards_the_limit():
    size = call.MAX_WAITING_BYTES // 4
    inbox = call.ThreadInbox()
    for _ in range(10):
        inbox.put(wire.Chunk(s=0), size)
        assert not inbox.full
        inbox.take(0)
    for _ in range(4):
        inbox.put(wire.Chunk(s=0), size)
    assert inbox.full


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x", "stop": ["\ud800"]}, "stop"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "stop": CYCLE}, "stop"),
        ({"prompt": "x", "top_k": 1, "stop": {"a": CYCLE}}, "stop"),
        ({"prompt": "x", "stop": (("deep", DEEP),)}, "stop"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": CYCLE}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "user", "content": DEEP}]}, "messages[0].content"),
        ({"messages": CYCLE}, "messages[0]"),
    ],
)
def test_what_cannot_be_sent_is_named(worker, connect, request_, field):
    with pytest.raises(BadField) as caught:
        connect(worker.endpoint).generate(**request_)
    assert caught.value.field == field
    assert "ChatMessage()" not in str(caught.value) or "colour" in str(caught.value)
