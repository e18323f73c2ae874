"""The miro-worker command, with a fake engine in place of the real one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from raw_client import DEADLINE_S

from miro_client.errors import ConfigError
from miro_worker.__main__ import main

#: Replaces miro_cy.Engine, then runs the command.
PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv.pop(1))
import miro_cy
from fake_engine import FakeEngine
from miro_client.errors import ModelNotFound
class Engine(FakeEngine):
    @classmethod
    def load(cls, path, **options):
        if path == "missing":
            raise ModelNotFound("no model named missing")
        assert options == {"threads": 2, "kv_memory": "1GiB"}, options
        return cls()
    def close(self):
        say("closed")
def say(what, write=os.write, wait=time.sleep):
    write(1, f"{what}\\n".encode())
    wait(float(os.environ.get("LINGER_S", 0)))
class Last:
    def __del__(self, say=say):  # while the interpreter is taken apart
        say("last")
last = Last()
miro_cy.Engine = Engine
from miro_worker.__main__ import main
main()
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), *arguments]


@pytest.fixture
def start(folder):
    """Run the command; returns (process, endpoint)."""
    processes = []

    def run(**variables):
        endpoint = f"ipc://{folder}/c.sock"
        process = subprocess.Popen(
            command("--model", "fake", "--bind", endpoint, "--threads", "2", "--kv-memory", "1GiB", "--grace-ms", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        processes.append(process)
        return process, endpoint

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_it_says_ready_serves_and_stops(start, raw):
    process, endpoint = start()
    assert process.stderr.readline() == (
        f"ready endpoint={endpoint} model=fake context=4096 kv_dtype=int8 kv_bytes_per_token=80 capacity=8192\n"
    )
    client = raw(endpoint)
    assert client.until_end(client.generate())[-1].reason == "length"
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert out == "closed\nlast\n"
    assert "draining" in errors


@pytest.mark.parametrize("moment", ["closed", "last"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_it_ends_change_nothing(start, moment, number):
    """While the engine is closed, and when the interpreter has taken its own handlers back."""
    process, _ = start(LINGER_S="0.2")
    assert process.stderr.readline().startswith("ready")
    process.send_signal(number)
    while (line := process.stdout.readline()) != f"{moment}\n":
        assert line == "closed\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_errors_are_one_line(folder):
    for arguments, text in (
        (("--model", "missing"), "no model named missing"),
        (("--model", "fake", "--threads", "2", "--kv-memory", "1GiB", "--bind", "tcp://*:1"), "only ipc://"),
    ):
        done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2)  # 2: the setting itself is wrong
        assert text in done.stderr
        assert "Traceback" not in done.stderr


def test_help_has_an_example_and_loads_no_engine():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "Example: miro-worker --model" in result.output
    code = "import sys, miro_worker.__main__; print(sorted({'zmq', 'numpy', 'miro_cy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("mode", ["fast", "exact", "bf16"])
def test_every_compute_mode_reaches_the_engine(monkeypatch, mode):
    def load(path, **options):
        assert (path, options) == ("m.gguf", {"compute": mode, "kv_memory": "auto"})
        raise ConfigError("compute needs what is not there", field="compute")

    monkeypatch.setattr("miro_cy.Engine.load", load)
    done = CliRunner().invoke(main, ["--model", "m.gguf", "--compute", mode])
    assert done.exit_code == 2
    assert "compute needs what is not there" in done.stderr
    assert CliRunner().invoke(main, ["--model", "m.gguf", "--compute", mode.title()]).exit_code == 2


@pytest.mark.parametrize(
    ("option", "value", "limits"),
    [
        ("--grace-ms", "2147483648", ("0", "2147483647")),
        ("--threads", "99999", ("1", "1024")),
        ("--max-num-seqs", "9" * 4000, ("1", "4096")),
        ("--max-step-tokens", "65537", ("1", "65536")),
        ("--step-ms", "1e300", ("0", "60000")),
        ("--watermark", "0.6", ("0", "0.5")),
    ],
)
def test_a_value_out_of_range_is_refused_with_both_limits(option, value, limits):
    """Before any model is looked for."""
    done = CliRunner().invoke(main, ["--model", "/nowhere", option, value])
    assert done.exit_code == 2
    refusal = done.stderr.splitlines()[-1]
    assert option in refusal or option.removeprefix("--").replace("-", "_") in refusal
    assert set(limits) <= set(re.findall(r"\d+(?:\.\d+)?", refusal))


NOT_FAST = "kv_dtype 'bf16' goes with compute 'bf16', in tile registers (Intel AMX), not with 'fast'"


@pytest.mark.parametrize("isa", ["", "generic"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--compute", "fast"], NOT_FAST),
        (["--max-num-seqs", "4"], NOT_FAST),
        (["--compute", "exact"], "compute 'exact' keeps the KV cache in fp32; kv_dtype 'bf16' contradicts it"),
    ],
    ids=" ".join,
)
def test_a_kv_cache_of_bf16_without_its_arithmetic_is_refused_by_name(folder, options, text, isa):
    """With a real model, on this machine and as on one without tile registers."""
    model = str(Path(__file__).parents[1] / "data" / "golden" / "gguf" / "Q4_1.gguf")
    asked = ["--model", model, "--bind", f"ipc://{folder}/c.sock", "--kv-dtype", "bf16", *options]
    program = [sys.executable, "-c", "from miro_worker.__main__ import main; main()"]
    environment = os.environ | {"MIRO_ISA": isa}
    done = subprocess.run([*program, *asked], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    *usage, line = done.stderr.splitlines()
    assert line == f"Error: {text}"
    assert not any("Error" in other or "Traceback" in other for other in usage)
