"""Several choices through the clients: which piece belongs to which, and what is left when one of them fails."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import answer, ids_of
from raw_client import DEADLINE_S, wait_until

from miro_client import AsyncClient, wire
from miro_client.errors import BadField, ConnectionLost, NonFinite, Restarted

USAGE = {"usage": wire.Usage(prompt=1, completion=1), "timing": wire.Timing()}


def texts(prompt, count, n):
    return [answer(ids_of(prompt), count, choice)[0] for choice in range(n)]


def check(result, n=3):
    assert [choice.text for choice in result.choices] == texts("hello", 6, n)
    assert (result.text, result.tokens) == (result.choices[0].text, result.choices[0].tokens)
    assert [choice.tokens for choice in result.choices] == [answer(ids_of("hello"), 6, i)[1] for i in range(n)]
    for choice in result.choices:
        assert (choice.finish_reason, choice.usage.completion_tokens, choice.score) == ("length", 6, None)
        assert (choice.prompt_tokens, choice.seed, choice.fingerprint) == (ids_of("hello"), 5, "fake/1")
        assert (len(choice.logprobs), choice.choices) == (6, [])
    assert [choice.prompt_logprobs is None for choice in result.choices] == [False, *[True] * (n - 1)]
    assert result.prompt_logprobs == result.choices[0].prompt_logprobs


ASKED = {"max_tokens": 6, "seed": 5, "logprobs": 1, "prompt_logprobs": 0}


def test_whole_and_streamed(worker, connect):
    client = connect(worker.endpoint)
    check(client.complete("hello", n=3, **ASKED))
    stream = client.generate("hello", n=3, **ASKED)
    chunks = list(stream)
    assert {chunk.choice for chunk in chunks} == {0, 1, 2}
    for choice, text in enumerate(texts("hello", 6, 3)):
        assert "".join(chunk.text for chunk in chunks if chunk.choice == choice) == text
    check(stream.result)
    assert len(client.complete("hello", max_tokens=1).choices) == 1


def test_asyncio(worker):
    async def work():
        async with AsyncClient(worker.endpoint) as client:
            check(await client.complete("hello", n=3, **ASKED))
            stream = client.generate("hello", n=3, **ASKED)
            pieces = [""] * 3
            async for chunk in stream:
                pieces[chunk.choice] += chunk.text
            assert pieces == texts("hello", 6, 3)
            check(stream.result)

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_a_beam_search_has_scores(worker, connect):
    result = connect(worker.endpoint).complete("hello", beam_width=3, max_tokens=6)
    assert [choice.score for choice in result.choices] == [-1.0, -2.0, -3.0]
    assert result.score == -1.0
    assert [choice.text for choice in result.choices] == texts("hello", 6, 3)


@pytest.mark.parametrize("n", [0, -1, True, "2", 2**70, 65, 1.5, None])
def test_no_number_of_choices(worker, connect, n):
    with pytest.raises(BadField) as caught:
        connect(worker.endpoint).complete("hello", n=n, max_tokens=1)
    assert caught.value.field == "n"


def test_closing_after_one_has_ended_cancels_the_rest(worker, connect, engine):
    engine.shorter, engine.step_seconds = 3998, 0.001
    client = connect(worker.endpoint)
    stream = client.generate("hello", n=3, max_tokens=4000)
    seen = 0
    while seen < 5:
        seen += next(stream).choice == 0
    with pytest.raises(ConnectionLost):
        _ = stream.result
    stream.close()
    wait_until(lambda: not engine.has_work, "it was aborted")
    wait_until(lambda: not client.ping().live, "and is forgotten")
    assert list(stream) == []


def test_the_worker_stops_in_between(worker, connect, engine):
    engine.shorter, engine.step_seconds = 3998, 0.001
    stream = connect(worker.endpoint).generate("hello", n=3, max_tokens=4000)
    seen = 0
    while seen < 5:
        seen += next(stream).choice == 0
    worker.stop(0)
    with pytest.raises((Restarted, ConnectionLost)):
        list(stream)
    with pytest.raises(ConnectionLost):
        _ = stream.result


def test_one_that_fails_fails_the_request(connect, endpoint, silent):
    got = []

    def reply(frames):
        got.append(frames[1])
        if frames[1] == b"\x02":
            yield wire.encode(frames[2], wire.Accepted(tokens=wire.pack_ids([1]), seed=1, position=1, fingerprint="f"))
            yield wire.encode(frames[2], wire.Chunk(i=1, s=0, t="b"))
            yield wire.encode(
                frames[2], wire.End(i=1, reason="error", code="non_finite", message="m", more=True, **USAGE)
            )
        elif frames[1] == b"\x04":
            yield wire.encode(frames[2], wire.End(i=0, reason="cancelled", **USAGE))

    with silent(endpoint, reply):
        client = connect(endpoint)
        stream = client.generate("abc", n=2)
        assert (chunk := next(stream)).choice == 1
        assert chunk.text == "b"
        with pytest.raises(NonFinite):
            next(stream)
        wait_until(lambda: b"\x04" in got, "the rest was cancelled")
        wait_until(lambda: not client._connection._calls, "and its END has come")


def test_a_lost_chunk_is_noticed_whichever_choice_it_was_of(connect, endpoint, silent):
    def reply(frames):
        if frames[1] == b"\x02":
            yield wire.encode(frames[2], wire.Chunk(i=1, s=0, t="b"))
            yield wire.encode(frames[2], wire.End(i=1, reason="length", more=True, **USAGE))
            yield wire.encode(frames[2], wire.Chunk(i=0, s=2, t="a"))

    with silent(endpoint, reply):
        stream = connect(endpoint).generate("abc", n=2)
        assert next(stream).text == "b"
        with pytest.raises(ConnectionLost, match="chunk 1"):
            next(stream)
