"""A client as a part of its process: closing, sleeping, imports, exit, fork."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from fake_engine import answer, ids_of

from miro_client.errors import (
    ConnectionLost,
)


def test_closing_is_prompt_and_final(worker, connect, endpoint):
    client = connect(worker.endpoint)
    client.ping()
    client.close()
    client.close()
    assert not client._connection._thread.is_alive()
    with pytest.raises(ConnectionLost, match="closed"):
        client.complete("abc")
    unused = connect(f"{endpoint}.nobody")
    unused.close()
    assert not unused._connection._thread.is_alive()


def test_an_idle_client_sleeps(worker, connect, monkeypatch):
    client = connect(worker.endpoint)
    client.complete("abc", max_tokens=2)
    turns, take = [], client._connection._take_commands
    monkeypatch.setattr(client._connection, "_take_commands", lambda: turns.append(1) or take())
    time.sleep(0.3)
    assert len(turns) <= 1  # the one that delivered the answer may end late
    client.ping()
    assert turns


def test_importing_the_client_loads_neither_zeromq_nor_an_engine():
    code = (
        "import sys, miro_client; from miro_client import default_endpoint, MiroError; default_endpoint(); "
        "print(sorted({'zmq', 'msgspec', 'numpy', 'miro_cy', 'miro_worker'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
    code = "import sys; from miro_client import Client; print(sorted({'numpy', 'miro_cy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_program_that_forgets_to_close_still_ends(worker):
    code = f"""
from miro_client import Client
client = Client({worker.endpoint!r})
stream = client.generate("abc", max_tokens=4000)
print(next(stream).text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == answer(ids_of("abc"), 1)[0].strip()


def test_after_a_fork_the_old_client_refuses_and_a_new_one_works(worker):
    code = f"""
import os
from miro_client import Client
from miro_client.errors import ConnectionLost
client = Client({worker.endpoint!r})
stream = client.generate("abc", max_tokens=4000)
next(stream)
child = os.fork()
if not child:
    for use in (client.ping, lambda: next(stream)):
        try:
            use()
        except ConnectionLost as error:
            print("refused", flush=True)
    client.close()
    print(Client({worker.endpoint!r}).complete("abc", max_tokens=1).text, flush=True)
    os._exit(0)
os.waitpid(child, 0)
next(stream)
print(client.complete("abc", max_tokens=1).text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    text = answer(ids_of("abc"), 1)[0]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"refused\nrefused\n{text}\n{text}\n"
