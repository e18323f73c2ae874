"""AsyncClient as a part of its process: event loops that come and go, lost workers, Ctrl-C, fork, idleness."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_engine import answer, ids_of
from raw_client import DEADLINE_S, wait_until

from miro_client import AsyncClient, connection, wire
from miro_client.errors import ConnectionLost, Restarted
from miro_worker import Worker, WorkerConfig

LONG = 4000


def run(work):
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


async def drain(stream):
    async for _ in stream:
        pass


def test_one_client_in_two_loops_in_sequence(worker, engine):
    """The first loop is closed while a reply of its stream is awaited; the second goes on with the stream."""
    client = AsyncClient(worker.endpoint, timeout=DEADLINE_S)
    stream = client.generate("abc", max_tokens=6)
    first = run(anext(stream))
    engine.gate.clear()
    loop = asyncio.new_event_loop()
    waits = loop.create_task(client.complete("xyz", max_tokens=3))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert not waits.done()
    waits._log_destroy_pending = False
    loop.close()
    engine.gate.set()
    wait_until(lambda: not engine.has_work, "both were answered")

    async def rest():
        text = first.text
        async for chunk in stream:
            text += chunk.text
        await client.ping()
        await client.aclose()
        return text

    assert run(rest()) == answer(ids_of("abc"), 6)[0]


def test_loops_of_two_threads_share_a_client(worker):
    client = AsyncClient(worker.endpoint)
    results = {}

    def work(number):
        async def ask():
            for round_ in range(5):
                results[number, round_] = (await client.complete(f"{number}/{round_}", max_tokens=4)).text

        run(ask())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    run(client.aclose())
    assert results == {(i, r): answer(ids_of(f"{i}/{r}"), 4)[0] for i in range(2) for r in range(5)}


def test_use_after_close(worker):
    async def work():
        async with AsyncClient(worker.endpoint) as client:
            await client.ping()
        await client.aclose()
        assert not client._connection._thread.is_alive()
        with pytest.raises(ConnectionLost, match="closed"):
            client.generate("abc")
        with pytest.raises(ConnectionLost, match="closed"):
            await client.ping()

    run(work())


def test_a_client_that_is_held_only_by_its_stream_stays_open(worker):
    async def work():
        return [chunk.text async for chunk in AsyncClient(worker.endpoint).generate("abc", max_tokens=5)]

    assert "".join(run(work())) == answer(ids_of("abc"), 5)[0]


def test_no_worker(endpoint, monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_S", 0.1)

    async def work():
        async with AsyncClient(endpoint) as client:
            with pytest.raises(ConnectionLost, match="no worker answers at ipc"):
                await client.complete("abc")
            with pytest.raises(ConnectionLost):
                await client.hello()

    run(work())


def test_a_worker_that_stops_and_one_that_takes_its_place(endpoint, engine):
    engine.step_seconds = 0.002

    async def work():
        async with AsyncClient(endpoint) as client:
            with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)) as first:
                stream = client.generate("abc", max_tokens=LONG)
                await anext(stream)
                await asyncio.to_thread(first.stop, 0)
                with pytest.raises(Restarted):
                    await drain(stream)
            with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)):
                return (await client.complete("abc", max_tokens=2)).text

    assert run(work()) == answer(ids_of("abc"), 2)[0]


def test_a_worker_that_is_killed(endpoint):
    program = str(Path(__file__).parent.parent / "worker" / "fake_engine.py")

    async def work(process):
        async with AsyncClient(endpoint) as client:
            streams = [client.generate("abc", max_tokens=LONG) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            process.kill()
            for stream in streams:
                with pytest.raises(ConnectionLost, match="closed the connection"):
                    await drain(stream)

    with subprocess.Popen([sys.executable, program, endpoint, "0.002"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            run(work(process))
        finally:
            process.kill()


def test_a_lost_chunk_is_noticed(endpoint, silent):
    def reply(got):
        if got[1] == b"\x02":
            yield wire.encode(got[2], wire.Chunk(s=0, t="a"))
            yield wire.encode(got[2], wire.Chunk(s=2, t="c"))

    async def work():
        async with AsyncClient(endpoint) as client:
            stream = client.generate("abc")
            assert (await anext(stream)).text == "a"
            with pytest.raises(ConnectionLost, match="chunk 1"):
                await anext(stream)

    with silent(endpoint, reply):
        run(work())


def test_an_idle_client_sleeps(worker, monkeypatch):
    async def work():
        async with AsyncClient(worker.endpoint) as client:
            await client.complete("abc", max_tokens=2)
            turns, take = [], client._connection._take_commands
            monkeypatch.setattr(client._connection, "_take_commands", lambda: turns.append(1) or take())
            woken = []
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(
                loop, "_process_events", lambda events, f=loop._process_events: woken.append(1) or f(events)
            )
            await asyncio.sleep(0.3)
            assert len(turns) <= 1  # the one that delivered the answer may end late
            assert len(woken) <= 3
            await client.ping()
            assert turns

    run(work())


def test_ctrl_c_ends_the_program_and_the_request(worker, engine):
    engine.step_seconds = 0.002
    code = f"""
import asyncio
from miro_client import AsyncClient
async def work():
    async with AsyncClient({worker.endpoint!r}) as client:
        async for chunk in client.generate("abc", max_tokens={LONG}):
            print("chunk", flush=True)
try:
    asyncio.run(work())
except KeyboardInterrupt:
    print("interrupted")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"chunk\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, b"")
    assert out.endswith(b"interrupted\n")
    wait_until(lambda: not engine.has_work, "the worker stopped")


def test_a_program_that_forgets_to_close_still_ends(worker):
    code = f"""
import asyncio
from miro_client import AsyncClient
client = AsyncClient({worker.endpoint!r})
stream = client.generate("abc", max_tokens={LONG})
async def work():
    print((await anext(stream)).text)
asyncio.run(work())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == answer(ids_of("abc"), 1)[0].strip()


def test_after_a_fork_the_old_client_refuses_and_a_new_one_works(worker):
    code = f"""
import asyncio, os
from miro_client import AsyncClient
from miro_client.errors import ConnectionLost
client = AsyncClient({worker.endpoint!r})
stream = client.generate("abc", max_tokens={LONG})
async def one():
    return (await anext(stream)).text
asyncio.run(one())
child = os.fork()
async def refused():
    for use in (client.ping, one):
        try:
            await use()
        except ConnectionLost:
            print("refused", flush=True)
    await client.aclose()
    async with AsyncClient({worker.endpoint!r}) as other:
        print((await other.complete("abc", max_tokens=1)).text, flush=True)
if not child:
    asyncio.run(refused())
    os._exit(0)
os.waitpid(child, 0)
async def goes_on():
    await one()
    print((await client.complete("abc", max_tokens=1)).text)
asyncio.run(goes_on())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    text = answer(ids_of("abc"), 1)[0]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"refused\nrefused\n{text}\n{text}\n"


def test_importing_it_loads_no_engine_and_the_blocking_client_no_asyncio():
    code = "import sys; from miro_client import {}; print(sorted({{'numpy', 'miro_cy', 'asyncio'}} & set(sys.modules)))"
    for name, loaded in (("Client", "[]\n"), ("AsyncClient", "['asyncio']\n")):
        done = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, timeout=60)
        assert done.stdout == loaded, done.stderr
