"""What the engine says and no message can hold: its request ends with an error at once, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from fake_engine import FakeEngine, answer, ids_of
from raw_client import text_of, wait_until

from miro_client import wire
from miro_client.endpoint import control_endpoint
from miro_client.errors import BadField, QueueFull
from miro_cy.requests import Timing, TokenLogprob, Usage

LONE = "\ud800"  # half a character: no text, to UTF-8
ODD = object()


def spoil(engine: FakeEngine, at: int, **fields: Any) -> None:
    """Of the prompt "bad", the event after so many tokens has these fields."""
    one = engine._one

    def spoiled(event, running, limit):
        before = running.done
        event = one(event, running, limit)
        if running.prompt == ids_of("bad") and before == at:
            for name, value in fields.items():
                setattr(event, name, value)
        return event

    engine._one = spoiled


def check_all_is_well(worker, raw, engine) -> None:
    """The worker serves on, and has counted every request once."""
    wait_until(lambda: not engine.has_work, "what could not be told was aborted")
    client = raw(worker)
    assert text_of(client.until_end(client.generate("again", max_tokens=3))) == answer(ids_of("again"), 3)[0]
    client.send(wire.Ping())
    assert client.receive()[1].live == []
    stats = worker._reports.stats()
    assert stats.live == 0
    assert stats.requests == sum(stats.ended.values()) + sum(stats.refused.values()) + stats.abandoned


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"text": LONE},
        {"text": ODD},
        {"tokens": [2**31]},
        {"tokens": [ODD]},
        {"logprobs": [TokenLogprob(0.0, [(2**64, 0.0)])]},
        {"logprobs": [ODD]},
        {"prompt_logprobs": [None, ODD], "finish_reason": "length"},
        {"finish_reason": "stop", "stop": ODD},
        {"finish_reason": "stop", "stop": LONE},
        {"finish_reason": "length", "score": ODD},
        {"finish_reason": "length", "usage": Usage(ODD, 0, 1)},
        {"finish_reason": "length", "timing": Timing(ODD, 0.0, 0.0)},
        {"finish_reason": "error", "error": ODD},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_an_event_that_cannot_be_sent_ends_its_request(serve, raw, engine, fields, stream):
    spoil(engine, 2, **fields)
    worker = serve()
    client, other = raw(worker), raw(worker)
    bad, good = client.generate("bad", max_tokens=40, stream=stream), other.generate("good", max_tokens=40)
    end = client.until_end(bad)[-1]
    assert isinstance(end, wire.End)
    assert (end.reason, end.code) == ("error", "internal")
    assert text_of(other.until_end(good)) == answer(ids_of("good"), 40)[0]
    check_all_is_well(worker, raw, engine)


def test_what_is_found_when_credit_comes_ends_its_request(serve, raw, engine):
    """Nothing hears of it when the engine says so: the END waits behind output."""
    spoil(engine, 4, finish_reason="stop", stop=ODD)
    worker = serve()
    client = raw(worker)
    request = client.generate("bad", max_tokens=40, credit=1)
    assert isinstance(client.receive()[1], wire.Accepted)
    assert isinstance(client.receive()[1], wire.Chunk)
    wait_until(lambda: worker._io._sessions.delivery.waiting, "the rest waits for credit")
    client.send(wire.Credit(add=1), request)
    replies = client.until_end(request)
    assert (replies[-1].reason, replies[-1].code) == ("error", "internal")
    engine._requests.clear()
    check_all_is_well(worker, raw, engine)


def test_what_is_found_when_a_slow_client_reads_ends_its_request(serve, raw, engine):
    spoil(engine, 3999, stop=ODD)
    worker = serve(send_hwm=4)
    client = raw(worker, RCVHWM=1, RCVBUF=4096)
    request = client.generate("bad", max_tokens=4000, sampling={"logprobs": 2})
    wait_until(lambda: engine.added and not engine.has_work, "all is generated, little of it read")
    wait_until(lambda: worker._io._sessions.delivery.waiting, "the rest waits")
    replies = client.until_end(request)
    assert (replies[-1].reason, replies[-1].code) == ("error", "internal")
    check_all_is_well(worker, raw, engine)


def test_one_choice_that_cannot_be_sent_ends_all_that_are_left(serve, raw, engine):
    spoil(engine, 9, finish_reason="stop", stop=ODD)
    engine.shorter = 5
    client = raw(worker := serve())
    replies = client.until_end(client.generate("bad", max_tokens=10, n=2))
    first, last = (reply for reply in replies if isinstance(reply, wire.End))
    assert (first.i, first.reason, first.more) == (1, "length", True)
    assert (last.i, last.reason, last.code, last.more) == (0, "error", "internal", False)
    check_all_is_well(worker, raw, engine)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_acceptance_cannot_be_told_is_refused(serve, raw, engine, stream):
    engine.fingerprint = LONE
    worker = serve()
    client = raw(worker)
    (reply,) = client.until_end(client.generate("bad", stream=stream))
    assert reply.code == "internal"
    assert isinstance(reply, wire.Error if stream else wire.End)
    wait_until(lambda: not engine.has_work, "it was aborted")
    worker._io._sessions._fingerprint = "fake/1"
    check_all_is_well(worker, raw, engine)


@pytest.mark.parametrize("delimited", [True, False])
@pytest.mark.parametrize("where", ["prepare_errors", "add_errors"])
def test_a_refusal_that_cannot_be_told_is_told_otherwise(serve, raw, engine, where, delimited):
    worker = serve()
    client = raw(worker, zmq.REQ if delimited else zmq.DEALER)
    for error, code in (
        (QueueFull("full", retry_after_ms=ODD), "internal"),
        (BadField(LONE, field=LONE), "bad_field"),
        (RuntimeError(LONE), "internal"),
    ):
        getattr(engine, where).append(error)
        request = client.generate("bad", stream=False)
        got, reply = client.receive()
        assert (got, type(reply), reply.code) == (request, wire.Error, code)
    check_all_is_well(worker, raw, engine)


def test_an_answer_about_the_worker_that_cannot_be_told_is_an_error(serve, raw, engine):
    engine.name = LONE
    worker = serve()
    client, asker = raw(worker), raw(control_endpoint(worker.endpoint))
    for peer, question in ((client, wire.Hello()), (asker, wire.Models())):
        request = peer.send(question)
        got, reply = peer.receive()
        assert (got, type(reply), reply.code) == (request, wire.Error, "internal")
    check_all_is_well(worker, raw, engine)
