"""Several choices of one request: each with its CHUNKs and its END; to every limit they are one request."""

from __future__ import annotations

import msgspec
import pytest
import zmq
from fake_engine import answer, ids_of, scores
from raw_client import text_of, wait_until

from miro_client import wire
from miro_client.endpoint import control_endpoint
from miro_worker.output import LOGPROB_BYTES


def answers(prompt, count, n):
    return [answer(ids_of(prompt), count, choice)[0] for choice in range(n)]


def of_choice(replies, choice):
    return [r for r in replies if isinstance(r, wire.Chunk | wire.End) and r.i == choice]


def ends(replies):
    return [reply for reply in replies if isinstance(reply, wire.End)]


def stats(raw, worker):
    client = raw(control_endpoint(worker.endpoint))
    client.send(wire.Stats())
    reply = client.receive()[1].read(wire.StatsReply)
    client.close()
    assert reply.requests == reply.live + sum(reply.ended.values()) + sum(reply.refused.values()) + reply.abandoned
    return reply


def live(client):
    """This connection's live requests; drops what else is on its way."""
    client.send(wire.Ping())
    while not isinstance(reply := client.receive()[1], wire.Pong):
        pass
    return reply.live


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_a_stream_of_several(serve, raw, n):
    worker = serve()
    client = raw(worker)
    request = client.generate("abc", max_tokens=12, n=n, sampling={"logprobs": 1})
    replies = client.until_end(request)
    accepted, *rest = replies
    assert isinstance(accepted, wire.Accepted)
    chunks = [reply for reply in rest if isinstance(reply, wire.Chunk)]
    assert [chunk.s for chunk in chunks] == list(range(len(chunks)))
    assert [end.more for end in ends(rest)] == [True] * (n - 1) + [False]
    assert sorted(end.i for end in ends(rest)) == list(range(n))
    for choice, text in enumerate(answers("abc", 12, n)):
        *mine, end = of_choice(rest, choice)
        assert (text_of(mine), end.reason, end.usage.completion) == (text, "length", 12)
        assert sum(len(chunk.lp) for chunk in mine) == 12
        assert (end.t, end.k, end.tokens, end.score) == (None, None, None, None)
    assert (stats(raw, worker).ended, client.silent()) == ({"length": 1}, True)


@pytest.mark.parametrize("in_sampling", [True, False])
def test_whole_answers(serve, raw, in_sampling):
    client = raw(serve())
    sampling = {"prompt_logprobs": 1, "logprobs": 1}
    fields = {"sampling": sampling | {"n": 3}} if in_sampling else {"sampling": sampling, "n": 3}
    replies = client.until_end(client.generate("abc", max_tokens=5, stream=False, **fields))
    assert ends(replies) == replies
    by_choice = sorted(replies, key=lambda end: end.i)
    assert [end.t for end in by_choice] == answers("abc", 5, 3)
    assert [len(end.lp) for end in by_choice] == [5, 5, 5]
    assert [end.tokens and wire.unpack_ids(end.tokens) for end in by_choice] == [ids_of("abc"), None, None]
    assert [end.seed for end in by_choice] == [1234, None, None]
    assert [end.fingerprint for end in by_choice] == ["fake/1", None, None]
    assert [end.plp and len(end.plp) for end in by_choice] == [3, None, None]
    assert by_choice[0].plp[1] == (-ids_of("b")[0] / 2, scores(ids_of("ab"), 1)[1].top)
    assert sum(not end.more for end in replies) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_no_tokens_wanted(serve, raw, stream):
    client = raw(serve())
    replies = client.until_end(client.generate("abc", max_tokens=0, n=4, stream=stream))
    assert sorted(end.i for end in ends(replies)) == [0, 1, 2, 3]
    assert {end.reason for end in ends(replies)} == {"length"}


def test_it_is_live_until_its_last_choice_ends(serve, raw, engine):
    worker = serve(max_peer_requests=1)
    client = raw(worker)
    engine.shorter, engine.step_seconds = 1000, 0.001
    request = client.generate("abc", max_tokens=1002, n=2)
    while not isinstance(reply := client.receive()[1], wire.End):
        pass
    assert (reply.i, reply.more, reply.reason, reply.usage.completion) == (1, True, "length", 2)
    assert live(client) == [request]
    client.generate("abc", request_id=request)
    client.generate("one too many", request_id=b"too many")
    refused = {}
    while len(refused) < 2:
        got, reply = client.receive()
        if isinstance(reply, wire.Error):
            refused[reply.code] = got
    assert refused == {"duplicate_id": b"", "queue_full": b"too many"}
    now = stats(raw, worker)
    assert (now.live, now.ended, now.refused) == (1, {}, {"duplicate_id": 1, "queue_full": 1})
    assert ends(client.until_end(request))[-1].more is False
    assert (stats(raw, worker).ended, live(client)) == ({"length": 1}, [])


def test_cancel_after_one_has_ended(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    engine.shorter, engine.step_seconds = 3998, 0.001
    request = client.generate("abc", max_tokens=4000, n=3)
    got = []
    while len(ends(got)) < 2:
        got.append(client.receive()[1])
    client.send(wire.Cancel(), request)
    client.send(wire.Cancel(), request)
    (end,) = ends(client.until_end(request))
    assert (end.i, end.reason, end.more) == (0, "cancelled", False)
    assert {e.i: e.reason for e in ends(got)} == {1: "length", 2: "length"}
    wait_until(lambda: not engine.has_work, "it was aborted")
    client.send(wire.Cancel(), request)
    assert client.silent()
    assert stats(raw, worker).ended == {"cancelled": 1}


def test_cancel_before_the_engine_has_it(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    engine.text_gate.clear()
    request = client.generate("abc", n=3)
    client.send(wire.Cancel(), request)
    replies = client.until_end(request)
    engine.text_gate.set()
    assert [(end.i, end.reason) for end in replies] == [(0, "cancelled"), (1, "cancelled"), (2, "cancelled")]
    assert (client.silent(), engine.added) == (True, [])
    assert stats(raw, worker).ended == {"cancelled": 1}


def test_credit_is_shared_out_between_them(serve, raw, engine):
    client = raw(serve())
    request = client.generate("abc", max_tokens=40, n=3, credit=3)
    got = [client.receive()[1] for _ in range(4)]
    assert sorted(chunk.i for chunk in got[1:]) == [0, 1, 2]
    wait_until(lambda: not engine.has_work, "decoding went on")
    assert client.silent()
    for credit in (1, 1, 1):
        client.send(wire.Credit(add=credit), request)
        got += [client.receive()[1], client.receive()[1]]
    assert [type(reply) for reply in got[4:]] == [wire.Chunk, wire.End] * 3
    assert sorted(end.i for end in ends(got)) == [0, 1, 2]
    chunks = [reply for reply in got if isinstance(reply, wire.Chunk)]
    assert [chunk.s for chunk in chunks] == list(range(6))
    for choice, text in enumerate(answers("abc", 40, 3)):
        assert text_of(of_choice(got, choice)) == text
    assert live(client) == []


def test_cancel_with_one_chunk_of_credit_for_several(serve, raw, engine):
    """What is cut out of an answer that had ended makes it a cancelled one."""
    client = raw(serve())
    engine.shorter = 3990
    request = client.generate("abc", max_tokens=4000, n=4, credit=1)
    assert isinstance(client.receive()[1], wire.Accepted)
    first = client.receive()[1]
    wait_until(lambda: engine.steps > 20, "three have ended, but for their credit")
    client.send(wire.Cancel(), request)
    replies = client.until_end(request)
    assert {end.i: end.reason for end in ends(replies)} == dict.fromkeys(range(4), "cancelled")
    assert (first.s, len(ends(replies)), len(replies)) == (0, 4, 4)
    assert live(client) == []


def test_without_credit_in_time_all_of_them_end(serve, raw, engine):
    worker = serve(slow_client_ms=50)
    client = raw(worker)
    request = client.generate("abc", max_tokens=4000, n=3, credit=1)
    replies = client.until_end(request)
    assert [(end.reason, end.code) for end in ends(replies)] == [("error", "slow_client")] * 3
    assert sorted(end.i for end in ends(replies)) == [0, 1, 2]
    wait_until(lambda: not engine.has_work, "it was aborted")
    assert client.silent()
    assert stats(raw, worker).ended == {"error": 1}


def test_a_client_that_never_reads_costs_only_itself(serve, raw, engine):
    worker = serve(send_hwm=4, slow_client_ms=200)
    deaf, good = raw(worker, RCVHWM=1, RCVBUF=4096), raw(worker)
    for number in range(3):
        deaf.generate(f"deaf {number}", max_tokens=4000, n=3, sampling={"logprobs": 2})
    replies = good.until_end(good.generate("good", max_tokens=300))
    assert text_of(replies) == answer(ids_of("good"), 300)[0]
    wait_until(lambda: not engine.has_work, "the deaf client's requests ended")
    delivery, tally = worker._io._sessions.delivery, worker._io._sessions.tally
    wait_until(lambda: tally.dropped > 0 and not delivery.waiting, "what could not be delivered was dropped")
    assert live(good) == []
    now = stats(raw, worker)
    assert (now.live, now.ended["error"]) == (0, 3)


def test_a_client_that_pauses_loses_nothing(serve, raw, engine):
    worker = serve(send_hwm=4)
    client = raw(worker, RCVHWM=1, RCVBUF=4096)
    request = client.generate("pause", max_tokens=3000, n=4, sampling={"logprobs": 2})
    wait_until(lambda: engine.added and not engine.has_work, "all is generated, little of it read")
    wait_until(lambda: len(worker._io._sessions) == 0, "and has reached the I/O thread")
    assert worker._io._sessions.delivery.waiting
    replies = client.until_end(request)
    chunks = [reply for reply in replies if isinstance(reply, wire.Chunk)]
    assert [chunk.s for chunk in chunks] == list(range(len(chunks)))
    for choice, text in enumerate(answers("pause", 3000, 4)):
        assert text_of(of_choice(replies, choice)) == text
    assert client.silent()


def test_a_lost_connection_is_one_abandoned_request(serve, raw, engine):
    worker = serve()
    client = raw(worker)
    engine.shorter = 3000
    client.generate("abc", max_tokens=4000, n=5)
    wait_until(lambda: engine.added, "it runs")
    client.close()
    wait_until(lambda: not engine.has_work, "it was aborted")
    wait_until(lambda: stats(raw, worker).abandoned == 1, "and counted once")
    assert stats(raw, worker).live == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_fails_ends_all_that_have_not(serve, raw, engine, stream):
    worker = serve()
    client = raw(worker)
    engine.shorter, engine.step_seconds = 3998, 0.001
    request = client.generate("abc", max_tokens=4000, n=3, stream=stream)
    got = []
    while len(ends(got)) < 2:
        got.append(client.receive()[1])
    engine.step_errors.append(ValueError("broken"))
    (end,) = ends(client.until_end(request))
    assert (end.i, end.reason, end.code, end.more) == (0, "error", "internal", False)
    assert stats(raw, worker).ended == {"error": 1}
    assert ends(client.until_end(client.generate("abc", n=1)))[0].reason == "length"


def test_the_worker_stops_and_ends_each(serve, raw, engine):
    worker = serve(grace_ms=0)
    client = raw(worker)
    engine.step_seconds = 0.001
    request = client.generate("abc", max_tokens=4000, n=3)
    assert isinstance(client.receive()[1], wire.Accepted)
    worker.request_stop(0)
    replies = client.until_end(request)
    assert [(end.i, end.code) for end in ends(replies)] == [(i, "restarted") for i in range(3)]


def test_a_drain_waits_for_the_last_choice(serve, raw, engine):
    worker = serve(grace_ms=10_000)
    client = raw(worker)
    engine.shorter, engine.step_seconds = 90, 0.001
    request = client.generate("abc", max_tokens=100, n=2)
    assert isinstance(client.receive()[1], wire.Accepted)
    worker.request_stop()
    replies = client.until_end(request)
    assert {end.i: (end.reason, end.usage.completion) for end in ends(replies)} == {
        0: ("length", 100),
        1: ("length", 10),
    }
    assert worker.join(10)


def test_the_limit_of_an_answer_is_that_of_all_choices_together(serve, raw, engine):
    """Whole answers count together, those that have left too; how fast they leave does not matter."""
    worker = serve(max_reply_bytes=LOGPROB_BYTES * 2 * 100)
    client = raw(worker)
    fields = {"stream": False, "sampling": {"logprobs": 1}}
    assert ends(client.until_end(client.generate("abc", max_tokens=60, **fields)))[0].reason == "length"
    request = client.generate("abc", max_tokens=60, n=2, **fields)
    replies = client.until_end(request)
    assert [(end.reason, end.code) for end in replies] == [("error", "too_large")] * 2
    engine.shorter = 30
    request = client.generate("abc", max_tokens=90, n=2, **fields)
    replies = client.until_end(request)
    assert {end.i: (end.reason, end.code) for end in replies} in (
        {0: ("error", "too_large"), 1: ("error", "too_large")},
        {0: ("error", "too_large"), 1: ("length", None)},
    )
    wait_until(lambda: not engine.has_work, "it was aborted")
    assert stats(raw, worker).ended == {"length": 1, "error": 2}


@pytest.mark.parametrize("value", [0, -1, True, "2", 2**63, 65, 1.0, [2], {}])
@pytest.mark.parametrize("place", ["body", "sampling"])
def test_no_number_of_choices(serve, raw, value, place):
    client = raw(serve())
    fields = {"n": value} if place == "body" else {"sampling": {"n": value}}
    client.frames(b"MIRO1", b"\x02", b"12345678", msgspec.msgpack.encode({"prompt": "a", **fields}))
    got, error = client.receive()
    assert (got, error.code, error.field) == (b"12345678", "bad_field", "n")
    assert live(client) == []


def test_both_places_may_agree(serve, raw):
    client = raw(serve())
    replies = client.until_end(client.generate("abc", n=2, sampling={"n": 2}))
    assert len(ends(replies)) == 2
    (error,) = client.until_end(client.generate("abc", n=2, sampling={"n": 3}))
    assert (error.code, error.field) == ("bad_field", "n")
    (error,) = client.until_end(client.generate("abc", n=1, sampling={"n": True}))
    assert (error.code, error.field) == ("bad_field", "n")


@pytest.mark.parametrize("place", ["body", "sampling"])
def test_a_req_socket_takes_one_reply(serve, raw, place):
    client = raw(serve(), zmq.REQ)
    client.generate("abc", stream=False, **({"n": 2} if place == "body" else {"sampling": {"n": 2}}))
    error = client.receive()[1]
    assert (error.code, error.field) == ("unsupported", "n")
    client.generate("abc", stream=False, n=1)
    assert client.receive()[1].reason == "length"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("sampling", "n"), [({"beam_width": 4}, 4), ({"beam_width": 4, "n": 2}, 2)])
def test_a_beam_search(serve, raw, stream, sampling, n):
    """Its texts come at its end, each in one piece, with a score."""
    worker = serve()
    client = raw(worker)
    replies = client.until_end(client.generate("abc", max_tokens=5, stream=stream, sampling=sampling))
    last = sorted(ends(replies), key=lambda end: end.i)
    assert [(end.i, end.score, end.reason) for end in last] == [(i, -1.0 - i, "length") for i in range(n)]
    chunks = [reply for reply in replies if isinstance(reply, wire.Chunk)]
    assert [chunk.i for chunk in chunks] == (list(range(n)) if stream else [])
    assert [text_of(of_choice(replies, i)) or last[i].t for i in range(n)] == answers("abc", 5, n)
    assert stats(raw, worker).ended == {"length": 1}


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"beam_width": 17}, "beam_width"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "yes"}, "early_stopping"),
    ],
    ids=str,
)
def test_no_beam_search(serve, raw, sampling, field):
    client = raw(serve())
    (error,) = client.until_end(client.generate("abc", sampling=sampling))
    assert (error.code, error.field) == ("bad_field", field)


def test_a_req_socket_takes_no_beams(serve, raw):
    client = raw(serve(), zmq.REQ)
    client.generate("abc", stream=False, sampling={"beam_width": 2})
    error = client.receive()[1]
    assert (error.code, error.field) == ("unsupported", "beam_width")
    client.generate("abc", stream=False, sampling={"beam_width": 1})
    assert client.receive()[1].reason == "length"
