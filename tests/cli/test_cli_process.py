"""The command line in a process of its own: signals, pipes, terminals, what is imported."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miro_client.cli import COMMANDS
from miro_cy._kernels import select

pytestmark = pytest.mark.timeout(60)

SOURCES = [str(Path(__file__).parents[2] / part) for part in ("", "worker", "client")]
HERE = str(Path(__file__).parent)


def python(code: str, **options: Any) -> subprocess.Popen[bytes]:
    """A Python process with the project on its path, and pipes on its three streams unless told otherwise."""
    head = f"import sys; sys.path[:0] = {[HERE, *SOURCES]!r}\n"
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | options
    return subprocess.Popen([sys.executable, "-c", head + code], **streams)


ENDLESS = """
import miro_cy
from conftest import FakeEngine
class Words:
    def __iter__(self):
        while True: yield "word "
class Endless(FakeEngine):
    words, asked = Words(), []
    def __exit__(self, *exc):
        print("ended", self.streams_closed, file=sys.stderr)
vars(miro_cy)["Engine"] = Endless
from miro_client.cli import main
main(["run", "x"])
"""


def test_real_interrupt() -> None:
    with python(ENDLESS) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(5) == b"word "
        process.send_signal(signal.SIGINT)
        while process.stdout.read(1 << 16):
            pass
        assert process.stderr.read() == b"ended 1\n"
    assert process.returncode == 130


def test_reader_that_goes_away_ends_the_request_quietly() -> None:
    with python(ENDLESS) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(5) == b"word "
        process.stdout.close()
        assert process.stderr.read() == b"ended 1\n"
    assert process.returncode == 141


SHORT = """
import miro_cy
from conftest import FakeEngine
class Short(FakeEngine):
    asked = []
vars(miro_cy)["Engine"] = Short
from miro_client.cli import main
main(ARGUMENTS)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "x"],
        ["run", "--json", "x"],
        ["chat"],
        ["status"],
        ["drain", "--json"],
        ["inspect", "model"],
        ["inspect", "--connect", "default"],
        ["pull", "smollm2"],
    ],
    ids=" ".join,
)
def test_closed_standard_output_is_one_line(arguments: list[str]) -> None:
    code = "import os; os.close(1)\nsys.stdout = None\n" + SHORT.replace("ARGUMENTS", repr(arguments))
    with python(code) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (1, b"", b"miro: error: standard output is closed\n")


@pytest.mark.parametrize(
    "arguments", [["run", "x"], ["run", "--json", "x"], ["--help"], ["--version"], ["run", "--help"]], ids=" ".join
)
def test_full_standard_output_is_one_line(arguments: list[str]) -> None:
    with (
        open("/dev/full", "wb") as full,
        python(SHORT.replace("ARGUMENTS", repr(arguments)), stdout=full) as process,
    ):
        err = process.communicate()[1]
    assert (process.returncode, err) == (1, b"miro: error: No space left on device\n")


TERMINAL = """
import miro_cy
from conftest import FakeEngine
class Hostile(FakeEngine):
    words, asked, finish_reason = ("a\\tb", "\\x1b]0;title\\x07"), [], "length"
vars(miro_cy)["Engine"] = Hostile
from miro_client.cli import main
main(["run", "x"])
"""


def read_terminal(code: str) -> str:
    """What the code writes to stdout and stderr when both are a terminal."""
    ours, theirs = pty.openpty()
    with python(code, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more
            while data := os.read(ours, 4096):
                seen += data
    os.close(ours)
    assert process.returncode == 0
    return seen.decode()


def test_terminal_gets_no_control_characters_and_a_remark() -> None:
    lines = read_terminal(TERMINAL).splitlines()
    assert lines == ["a\tb\ufffd]0;title\ufffd", "[cut after 2 tokens; --max-tokens sets how many]"]


def test_file_gets_the_text_as_it_is() -> None:
    with python(TERMINAL) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, b"a\tb\x1b]0;title\x07\n", b"")


def test_progress_is_for_terminals() -> None:
    code = """
from miro_client.cli.console import Progress
progress = Progress("tiny")
progress(1_000_000, 3_000_000, "downloading")
progress.end()
"""
    assert read_terminal(code).endswith("downloading tiny: 1 of 3 MB\r\n")
    with python(code) as process:
        assert process.communicate() == (b"", b"")


def test_help_imports_nothing_heavy() -> None:
    code = """
from miro_client.cli import main
main(["--help"], standalone_mode=False)
heavy = {"numpy", "zmq", "msgspec", "miro_cy", "miro_worker", "tokenizers", "jinja2", "asyncio"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    with python(code) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert all(name in out.decode() for name in COMMANDS)


def test_client_without_the_engine_says_what_to_install() -> None:
    code = """
import importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("miro_cy", "miro_worker"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from miro_client.cli import main
main(sys.argv[1:] or COMMAND)
"""
    for command in (["run", "x"], ["chat"], ["pull", "smollm2"], ["serve", "--model", "m"], ["inspect", "m"]):
        with python(code.replace("COMMAND", repr(command))) as process:
            out, err = process.communicate()
        assert (process.returncode, out) == (1, b"")
        assert err.startswith(b"miro: error: ")
        assert b"pip install miro-cy" in err
        assert err.count(b"\n") == 1


IMPORTING = """
import importlib.abc, os, signal
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Slow())
from miro_client.__main__ import main
sys.argv[1:] = ["--version"]
main()
"""


def test_an_interrupt_while_the_program_is_still_importing_is_quiet() -> None:
    with python(IMPORTING) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")
    with python(
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + IMPORTING
    ) as process:  # as for `miro &`
        out, err = process.communicate()
    assert (process.returncode, out[:5], err) == (0, b"miro ", b"")


MODEL = str(Path(__file__).parents[1] / "data" / "golden" / "gguf" / "Q4_1.gguf")
NOT_FAST = "kv_dtype 'bf16' goes with compute 'bf16', in tile registers (Intel AMX), not with 'fast'"


@pytest.mark.parametrize("isa", ["", "generic"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], NOT_FAST),
        (["--n", "4"], NOT_FAST),
        (["--compute", "fast"], NOT_FAST),
        (["--compute", "exact"], "compute 'exact' keeps the KV cache in fp32; kv_dtype 'bf16' contradicts it"),
        (["--compute", "bf16"], "compute 'bf16' needs tile registers (Intel AMX)"),
    ],
    ids=" ".join,
)
def test_a_kv_cache_of_bf16_without_its_arithmetic_is_refused_in_one_line(
    options: list[str], text: str, isa: str
) -> None:
    """On this machine, and as on one without tile registers: who does as one refusal says is told why by the next."""
    if options == ["--compute", "bf16"] and not isa and select.has_tiles():
        pytest.skip("this machine has tile registers")
    arguments = ["run", "--model", MODEL, "--kv-dtype", "bf16", *options, "x"]
    code = f"from miro_client.cli import main; main({arguments!r})"
    with python(code, env=os.environ | {"MIRO_ISA": isa}) as process:
        out, errors = process.communicate()
    assert (process.returncode, out) == (2, b"")
    (line,) = errors.decode().splitlines()
    assert line.startswith(f"Error: {text}")
