"""Flow control: credit windows, clients that do not read, replies that grow too large."""

from __future__ import annotations

import zmq
from fake_engine import answer, ids_of
from raw_client import text_of, wait_until

from miro_client import wire


def test_credit_counts_chunks_and_the_rest_coalesces(serve, raw, engine):
    client = raw(serve())
    request = client.generate("abc", max_tokens=40, credit=2)
    assert isinstance(client.receive()[1], wire.Accepted)
    first = [client.receive()[1] for _ in range(2)]
    wait_until(lambda: not engine.has_work, "decoding went on")
    assert client.silent()
    client.send(wire.Credit(add=1), request)
    third, end = client.receive()[1], client.receive()[1]
    assert third.s == 2
    assert text_of([*first, third]) == answer(ids_of("abc"), 40)[0]
    assert len(wire.unpack_ids(third.k)) == 40 - sum(len(wire.unpack_ids(chunk.k)) for chunk in first)
    assert (end.reason, end.usage.completion) == ("length", 40)


def test_without_credit_in_time_the_request_ends(serve, raw, engine):
    client = raw(serve(slow_client_ms=50))
    request = client.generate("abc", max_tokens=4000, credit=1)
    *_, end = client.until_end(request)
    assert (end.reason, end.code) == ("error", "slow_client")
    wait_until(lambda: not engine.has_work, "it was aborted")
    assert client.silent()


def test_cancel_needs_no_credit(serve, raw, engine):
    client = raw(serve())
    running = client.generate("abc", max_tokens=4000, credit=1)
    assert isinstance(client.receive()[1], wire.Accepted)
    assert isinstance(client.receive()[1], wire.Chunk)
    client.send(wire.Cancel(), running)
    assert client.until_end(running)[-1].reason == "cancelled"
    finished = client.generate("abc", max_tokens=3, credit=1)
    wait_until(lambda: len(engine.added) == 2 and not engine.has_work, "it is finished, but for its credit")
    client.send(wire.Ping())
    while not isinstance(reply := client.receive()[1], wire.Pong):
        pass
    assert reply.live == [finished]
    client.send(wire.Cancel(), finished)
    assert client.until_end(finished)[-1].reason == "cancelled"


def test_credit_for_a_stream_without_a_window_changes_nothing(serve, raw, engine):
    client = raw(serve())
    engine.gate.clear()
    request = client.generate("abc", max_tokens=10)
    client.send(wire.Credit(add=1), request)
    engine.gate.set()
    assert text_of(client.until_end(request)) == answer(ids_of("abc"), 10)[0]


def test_a_client_that_never_reads_costs_only_itself(serve, raw, engine):
    worker = serve(send_hwm=4, slow_client_ms=200)
    deaf, good = raw(worker, RCVHWM=1, RCVBUF=4096), raw(worker)
    for number in range(6):
        deaf.generate(f"deaf {number}", max_tokens=4000, sampling={"logprobs": 2})
    request = good.generate("good", max_tokens=500)
    assert text_of(good.until_end(request)) == answer(ids_of("good"), 500)[0]
    wait_until(lambda: not engine.has_work, "the deaf client's requests ended")
    delivery = worker._io._sessions.delivery
    tally = worker._io._sessions.tally
    wait_until(lambda: tally.dropped > 0 and not delivery.waiting, "what could not be delivered was dropped")
    assert good.until_end(good.generate("again", max_tokens=2))[-1].reason == "length"


def test_a_client_that_pauses_loses_nothing(serve, raw, engine):
    worker = serve(send_hwm=4)
    client = raw(worker, RCVHWM=1, RCVBUF=4096)
    requests = [client.generate(f"pause {i}", max_tokens=4000, sampling={"logprobs": 2}) for i in range(4)]
    wait_until(lambda: len(engine.added) == 4 and not engine.has_work, "all is generated, little of it read")
    wait_until(lambda: len(worker._io._sessions) == 0, "and has reached the I/O thread")
    assert worker._io._sessions.delivery.waiting
    replies: dict[bytes, list] = {request: [] for request in requests}
    while not all(r and isinstance(r[-1], wire.End) for r in replies.values()):
        got, reply = client.receive()
        replies[got].append(reply)
    for number, request in enumerate(requests):
        accepted, *chunks, end = replies[request]
        assert isinstance(accepted, wire.Accepted)
        assert [chunk.s for chunk in chunks] == list(range(len(chunks)))
        assert text_of(chunks) == answer(ids_of(f"pause {number}"), 4000)[0]
        assert sum(len(chunk.lp) for chunk in chunks) == 4000
        assert end.reason == "length"
    assert client.silent()


def test_a_flood_of_pings_that_are_not_read_stays_bounded(serve, raw):
    worker = serve(send_hwm=4, max_reply_bytes=20_000, slow_client_ms=200, messages_per_second=10**6)
    deaf, good = raw(worker, RCVHWM=1, RCVBUF=4096, SNDHWM=0), raw(worker)
    for _ in range(2000):
        deaf.send(wire.Ping(echo="x" * 1000))
    assert good.until_end(good.generate())[-1].reason == "length"
    delivery = worker._io._sessions.delivery
    wait_until(lambda: worker._io._sessions.tally.dropped > 0 and not delivery.waiting, "the outbox was dropped")


def test_a_whole_answer_that_grows_too_large_is_refused(serve, raw, engine):
    client = raw(serve(max_reply_bytes=2000))
    (end,) = client.until_end(client.generate("abc", max_tokens=4000, stream=False))
    assert (end.reason, end.code) == ("error", "too_large")
    wait_until(lambda: not engine.has_work, "it was aborted")
    assert client.until_end(client.generate("abc", max_tokens=100, stream=True))[-1].reason == "length"


def test_waiting_log_probabilities_are_counted_as_what_they_take(serve, raw, engine):
    client = raw(serve(max_reply_bytes=50_000))
    # 300 tokens with 3 pairs each: some 100 kB in memory, though far less on the wire.
    (end,) = client.until_end(client.generate("abc", max_tokens=300, stream=False, logprobs=2))
    assert (end.reason, end.code) == ("error", "too_large")
    assert client.until_end(client.generate("abc", max_tokens=300, stream=False))[-1].reason == "length"


def test_a_req_client_that_dies_while_it_waits(serve, raw, engine):
    worker = serve()
    client = raw(worker, zmq.REQ)
    client.generate("abc", max_tokens=4000, stream=False)
    wait_until(lambda: engine.added, "it runs")
    client.close()
    wait_until(lambda: not engine.has_work, "it was aborted")
