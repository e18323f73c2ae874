"""prompt_logprobs over the wire: they come with the END, streamed or not, and what no END could hold is refused."""

from __future__ import annotations

import pytest
import zmq
from fake_engine import answer, ids_of, scores
from raw_client import text_of, wait_until

from miro_client import wire
from miro_worker.output import LOGPROB_BYTES


def sent(prompt, top):
    return [None if entry is None else (entry.logprob, entry.top) for entry in scores(ids_of(prompt), top)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("top", "max_tokens"), [(0, 4), (3, 4), (128, 1), (2, 0)])
def test_the_end_carries_them(serve, raw, stream, top, max_tokens):
    client = raw(serve())
    request = client.generate("hello", stream=stream, max_tokens=max_tokens, sampling={"prompt_logprobs": top})
    replies = client.until_end(request)
    assert replies[-1].plp == sent("hello", top)
    assert replies[-1].plp[0] is None
    assert (text_of(replies) or replies[-1].t or "") == answer(ids_of("hello"), max_tokens)[0]
    assert replies[-1].reason == "length"
    assert client.until_end(client.generate("hello", stream=stream))[-1].plp is None


def test_a_req_socket_gets_them(serve, raw):
    client = raw(serve(), zmq.REQ)
    client.generate("hello", stream=False, sampling={"prompt_logprobs": 1})
    assert client.receive()[1].plp == sent("hello", 1)


def test_they_use_no_credit(serve, raw, engine):
    client = raw(serve())
    request = client.generate("hello", credit=1, max_tokens=1, sampling={"prompt_logprobs": 1})
    assert client.until_end(request)[-1].plp == sent("hello", 1)


def test_who_cancels_gets_those_that_are_complete(serve, raw, engine):
    client = raw(serve())
    engine.gate.clear()
    before = client.generate("hello", max_tokens=4000, sampling={"prompt_logprobs": 1})
    assert isinstance(client.receive()[1], wire.Accepted)
    client.send(wire.Cancel(), before)
    client.send(wire.Ping())
    assert isinstance(client.receive()[1], wire.Pong)
    engine.gate.set()
    end = client.until_end(before)[-1]
    assert (end.reason, end.plp) in [("cancelled", None), ("cancelled", sent("hello", 1))]
    after = client.generate("hello", max_tokens=4000, credit=1, sampling={"prompt_logprobs": 1})
    while not isinstance(client.receive()[1], wire.Chunk):
        pass
    client.send(wire.Cancel(), after)
    end = client.until_end(after)[-1]
    assert (end.reason, end.plp) == ("cancelled", sent("hello", 1))


@pytest.mark.parametrize("stream", [True, False])
def test_what_no_end_could_hold_is_refused_before_it_is_computed(serve, raw, engine, stream):
    limit = LOGPROB_BYTES * 4 * 100
    client = raw(serve(max_reply_bytes=limit))
    request = client.generate("x" * 101, stream=stream, max_tokens=0, sampling={"prompt_logprobs": 3})
    (error,) = client.until_end(request)
    assert (error.code, error.field) == ("too_large", "prompt_logprobs")
    assert str(limit) in error.message
    assert engine.added == []
    fits = client.generate("x" * 100, stream=stream, max_tokens=0, sampling={"prompt_logprobs": 3})
    assert client.until_end(fits)[-1].plp == sent("x" * 100, 3)


def test_an_answer_beside_them_counts_too_unless_it_is_streamed(serve, raw, engine):
    client = raw(serve(max_reply_bytes=LOGPROB_BYTES * 2 * 102))
    fields = {"max_tokens": 3000, "sampling": {"prompt_logprobs": 1}}
    (end,) = client.until_end(client.generate("x" * 100, stream=False, **fields))
    assert (end.reason, end.code, end.plp) == ("error", "too_large", None)
    wait_until(lambda: not engine.has_work, "it was aborted")
    *replies, end = client.until_end(client.generate("x" * 100, **fields))
    assert (end.reason, end.plp) == ("length", sent("x" * 100, 1))
    assert text_of(replies) == answer(ids_of("x" * 100), 3000)[0]


def test_a_request_that_fails_has_none(serve, raw, engine):
    client = raw(serve())
    engine.gate.clear()
    request = client.generate("hello", max_tokens=4000, sampling={"prompt_logprobs": 1})
    assert isinstance(client.receive()[1], wire.Accepted)
    engine.step_errors.append(ValueError("broken"))
    engine.gate.set()
    end = client.until_end(request)[-1]
    assert (end.reason, end.code, end.plp) == ("error", "internal", None)
