"""Thirty-two clients at once, half of them badly behaved: the others get what they get alone, nothing is left over."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
from raw_client import Raw, wait_until

from miro_client import Client, wire
from miro_client.endpoint import control_endpoint

DEADLINE_S = 120
POLITE = 16
#: Between two storms of the same kind: allocators are not exact.
GROWTH_BYTES = 24 * 2**20
#: A client in a process of its own, to be killed or stopped in the middle of a stream.
VICTIM = """
import sys
from miro_client import Client
stream = Client(sys.argv[1]).generate("Once upon a time", max_tokens=400, temperature=0, ignore_eos=True)
next(stream)
print("streaming", flush=True)
for _ in stream:
    pass
"""


def ask(i: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prompt and sampling of client i: greedy and sampled, short and long, text and chat."""
    story = "The old lighthouse keeper counted ships. " * (i % 5) + f"On day {i} he saw"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": story}]} if i % 3 == 0 else {"prompt": story}
    return prompt, {"max_tokens": 12 + i, "temperature": 0.0 if i % 2 else 0.8, "top_p": 0.95, "seed": i}


@pytest.fixture
def endpoint(smollm2_path: Path, tmp_path: Path) -> Iterator[str]:
    """A worker in a process of its own, with room for fewer than come: most have to wait."""
    endpoint = f"ipc://{tmp_path}/m.sock"
    command = [sys.executable, "-m", "miro_worker", "--model", str(smollm2_path), "--bind", endpoint]
    with subprocess.Popen(
        [*command, "--max-context", "2048", "--max-num-seqs", "8"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = ""
            while not line.startswith("ready "):
                line = process.stderr.readline()
                assert line, "the worker did not start"
            yield endpoint
            process.terminate()
            assert process.wait(30) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


class Storm:
    """All the clients of one round. `run` returns when the last one is through."""

    def __init__(self, endpoint: str, context: zmq.Context[Any], seed: int) -> None:
        self.endpoint, self.context, self.seed = endpoint, context, seed
        self.texts: dict[int, Any] = {}
        self.problems: list[str] = []
        self.requests = 0  # GENERATEs that reach the worker

    def raw(self, **options: Any) -> Raw:
        return Raw(self.context, self.endpoint, **options)

    def run(self) -> None:
        victims = [self._victim() for _ in range(2)]
        clients: list[Callable[[], None]] = [lambda i=i: self.polite(i) for i in range(POLITE)]
        for state in ("queued", "waiting", "prefilling", "decoding"):
            clients += [lambda state=state: self.cancelled(state)] * 2
        clients += [self.deaf, self.noise, self.stranger, lambda: self.twins()]
        self.requests += POLITE + 8 + 1 + 1 + len(victims)
        assert len(clients) + len(victims) + 2 == 32  # twins are two, and stranger makes two connections
        random.Random(self.seed).shuffle(clients)
        threads = [threading.Thread(target=self._guard, args=(client,), daemon=True) for client in clients]
        for thread in threads[:12]:
            thread.start()
        victims[0].send_signal(signal.SIGKILL)
        victims[1].send_signal(signal.SIGSTOP)
        for thread in threads[12:]:
            thread.start()
        deadline = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a client waits for ever"
        for victim in victims:
            victim.kill()
            victim.communicate()

    def _guard(self, client: Callable[[], None]) -> None:
        try:
            client()
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")

    def _victim(self) -> subprocess.Popen[str]:
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, self.endpoint], stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        assert victim.stdout.readline() == "streaming\n"
        return victim

    def polite(self, i: int) -> None:
        prompt, sampling = ask(i)
        with Client(self.endpoint, timeout=DEADLINE_S) as client:
            stream = client.generate(**prompt, **sampling)
            text = "".join(chunk.text for chunk in stream)
            self.texts[i] = text, stream.result.finish_reason, stream.result.usage.completion_tokens

    def cancelled(self, state: str) -> None:
        """Cancels in a certain state, and must get exactly one END."""
        client = self.raw()
        prompt = "a long story " * (400 if state == "prefilling" else 1)
        request = client.generate(prompt, sampling={"max_tokens": 300, "temperature": 0, "ignore_eos": True})
        for _ in range({"queued": 0, "waiting": 1, "prefilling": 1, "decoding": 4}[state]):
            client.receive(DEADLINE_S)
        if state == "prefilling":
            time.sleep(0.05)
        client.send(wire.Cancel(), request)
        while not isinstance((got := client.receive(DEADLINE_S))[1], wire.End | wire.Error):
            pass
        assert got[0] == request
        assert isinstance(got[1], wire.End)
        assert got[1].reason == "cancelled", got
        client.send(wire.Cancel(), request)
        assert client.silent(0.3), "more than one terminal reply"
        client.close()

    def deaf(self) -> None:
        """Asks for much, and reads none of it while the others are served."""
        client = self.raw(RCVHWM=1)
        client.generate("abc", sampling={"max_tokens": 300, "temperature": 0, "ignore_eos": True, "logprobs": 20})
        time.sleep(3)
        client.close()

    def noise(self) -> None:
        """Random frames: each message is answered with an ERROR, and with nothing else."""
        client, draw = self.raw(), random.Random(self.seed)
        sent = 60
        for _ in range(sent):
            client.frames(*(draw.randbytes(draw.randrange(1, 40)) for _ in range(draw.randrange(1, 6))))
        for _ in range(sent):
            assert isinstance(client.receive(DEADLINE_S)[1], wire.Error)
        assert client.silent(0.1)
        client.close()

    def stranger(self) -> None:
        """Bytes that are not even ZeroMQ's, on two connections."""
        draw = random.Random(self.seed)
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.connect(self.endpoint.removeprefix("ipc://"))
                try:
                    for _ in range(50):
                        stream.sendall(draw.randbytes(1000))
                except (BrokenPipeError, ConnectionResetError):
                    pass

    def twins(self) -> None:
        """Two that claim one routing id: the second neither reaches the worker nor hears anything of the first."""
        name = os.urandom(6)
        first = self.raw(ROUTING_ID=name)
        mine = first.generate("mine", sampling={"max_tokens": 60, "temperature": 0, "ignore_eos": True})
        first.receive(DEADLINE_S)
        second = self.raw(ROUTING_ID=name)
        second.generate("not mine", max_tokens=3)
        second.send(wire.Cancel(), mine)
        chunks = []
        while not isinstance((got := first.receive(DEADLINE_S))[1], wire.End):
            chunks.append(got)
            assert got[0] == mine
        assert (got[0], got[1].reason, got[1].usage.completion) == (mine, "length", 60)
        assert second.silent(0.1), "the second received something"
        second.close()
        first.close()


def stats(client: Raw) -> wire.StatsReply:
    client.send(wire.Stats())
    reply = client.receive()[1]
    assert isinstance(reply, wire.Result)
    return reply.read(wire.StatsReply)


def test_thirty_two_clients_at_once(endpoint: str) -> None:
    alone = {}
    with Client(endpoint, timeout=DEADLINE_S) as client:
        for i in range(POLITE):
            prompt, sampling = ask(i)
            result = client.complete(**prompt, **sampling)
            alone[i] = result.text, result.finish_reason, result.usage.completion_tokens
    context: zmq.Context[Any] = zmq.Context()
    try:
        control = Raw(context, control_endpoint(endpoint))
        resident, requests = [], POLITE
        for seed in range(2):
            storm = Storm(endpoint, context, seed)
            storm.run()
            requests += storm.requests
            assert storm.problems == []
            assert storm.texts == alone
            wait_until(lambda: stats(control).live == stats(control).running == 0, "all requests have ended")
            now = stats(control)
            assert (now.waiting, now.preparing) == (0, 0)
            assert now.free_blocks + now.cached_blocks == now.total_blocks
            assert now.requests == requests
            assert now.requests == sum(now.ended.values()) + sum(now.refused.values()) + now.abandoned
            resident.append(now.resident_bytes)
        assert resident[1] - resident[0] < GROWTH_BYTES
    finally:
        context.destroy(linger=0)
