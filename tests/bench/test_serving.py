"""Loads on a served model: who is asked for what, what counts, and what is printed. No speed is looked at."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import serving
from peers import result
from peers.works import PeerError
from served import report
from served.llama import llama_server, messages, version_of
from served.prompts import Prompts, common
from served.systems import Answer, ask
from served.worker import tail, worker
from served.works import INTRUDER_NEW, RUNNING, Intruding, Intrusion, Load, Sharing, intrude, share

MODEL = Path(__file__).parents[1] / "data" / "golden" / "gguf" / "Q4_1.gguf"
LOAD = Load(streams=3, stream_words=4, long_words=50, users=3, requests=7, prefix_words=20, words=3, new=5)


def letters(text: str) -> list[int]:
    return [1, *text.encode()]


class Fake:
    """Gives a token a millisecond, counts who is served at once, and knows which prompts it has seen."""

    name = "fake"

    def __init__(self, block: int = 8, pieces: int = 1) -> None:
        self._block = block
        self._lock = threading.Lock()
        self.asked: list[tuple[int, int]] = []
        self.now = self.most = self.closed = 0
        self._seen: list[list[int]] = []
        self._size = pieces

    def version(self) -> dict[str, str | int]:
        return {"version": 1}

    def pieces(self, prompt: Sequence[int], new: int, answer: Answer) -> Iterator[int]:
        with self._lock:
            self.asked.append((len(prompt), new))
            self.now += 1
            self.most = max(self.most, self.now)
            cached = max((common(prompt, other) for other in self._seen), default=0)
            self._seen.append(list(prompt))
        try:
            for _ in range(new // self._size):
                time.sleep(0.001)
                yield self._size
            answer.cached = cached // self._block * self._block
        except GeneratorExit:
            self.closed += 1
            raise
        finally:
            with self._lock:
                self.now -= 1


def test_prompts_are_words_in_ids() -> None:
    prompts = Prompts(letters)
    first, second = prompts.words(30), prompts.words(30)
    assert first[0] == second[0] == 1
    assert bytes(first[1:]).decode().count(" ") == 29
    assert first != second
    assert Prompts(letters).words(30) == first


def test_a_common_beginning_is_known_to_the_token() -> None:
    prompts, shared = Prompts(letters).sharing(6, 20, 3, 8)
    assert len({tuple(prompt) for prompt in prompts}) == 6
    for i, a in enumerate(prompts):
        for b in prompts[:i]:
            assert common(a, b) // 8 * 8 == shared
            assert a[:shared] == b[:shared]
            assert a[: shared + 8] != b[: shared + 8]


@pytest.mark.parametrize(
    ("a", "b", "n"), [([1, 2, 3], [1, 2, 4], 2), ([1, 2, 3], [1, 2, 3], 2), ([1], [1, 2], 0), ([5, 6], [7, 8], 0)]
)
def test_the_last_token_of_a_prompt_is_never_taken(a: list[int], b: list[int], n: int) -> None:
    assert common(a, b) == n


def test_gaps_that_overlap_a_time() -> None:
    answer = Answer(0.0, [1.0, 2.0, 4.0, 5.0, 9.0])
    assert answer.ttft == 1.0
    assert answer.gaps(2.5, 4.5) == [2.0, 1.0]
    assert answer.gaps(0.0, 10.0) == [1.0, 2.0, 1.0, 4.0]
    assert answer.gaps(5.5, 6.0) == [4.0], "one that spans all of it"
    assert answer.gaps(2.0, 4.0) == [2.0], "what only touches it does not count"
    assert answer.gaps(9.5, 10.0) == []


def test_an_answer_is_whole_or_given_up() -> None:
    fake = Fake(pieces=2)
    answer = ask(fake, [1, 2, 3], 6)
    assert (answer.tokens, len(answer.times), answer.cached) == (6, 3, 0)
    assert answer.times == sorted(answer.times)
    cut = ask(fake, [1, 2, 3], 100, enough=lambda: True)
    assert (cut.tokens, cut.cached, fake.closed, fake.now) == (2, None, 1, 0)
    with pytest.raises(PeerError, match="fake gave 6 tokens instead of 7"):
        ask(fake, [1], 7)


def test_a_long_prompt_arrives_while_all_streams_run() -> None:
    fake = Fake()
    found = intrude(fake, LOAD, Intruding.draw(LOAD, Prompts(letters)))
    (alone, news), *streams, (long, _) = fake.asked
    assert (news, len(streams), fake.most) == (INTRUDER_NEW, 3, 4)
    assert min(alone, long) > 4 * max(size for size, _ in streams)
    assert [new for _, new in streams] == [LOAD.stream_new] * 3
    assert (fake.closed, fake.now) == (3, 0), "nothing runs on"
    assert 0 < found.gap_p99_ms <= found.gap_max_ms
    assert min(found.ttft_ms, found.alone_ms) > 0


def test_streams_that_end_too_early_are_an_error() -> None:
    short = Load(streams=2, stream_words=3, stream_new=RUNNING - 1, long_words=9)
    with pytest.raises(PeerError, match="a stream ended too early"):
        intrude(Fake(), short, Intruding.draw(short, Prompts(letters)))


def test_users_share_one_list() -> None:
    fake, prompts = Fake(), Prompts(letters).sharing(7, 20, 3, 8)
    found = share(fake, LOAD, prompts[0])
    assert sorted(fake.asked) == sorted((len(prompt), 5) for prompt in prompts[0])
    assert fake.most <= 3
    assert found.cached == [0] + [prompts[1]] * 6
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("cached", "right"),
    [([0, 64, 64], True), ([0], True), ([0, 64, 65], False), ([0, 0, 64], False), ([64, 64], False), ([], False),
     (None, False)],
)  # fmt: skip
def test_cached_tokens_are_right_to_the_token(cached: list[int] | None, right: bool) -> None:
    if right:
        report.check_cached(cached, 64)
        return
    with pytest.raises(PeerError, match="0 once and 64 for all others"):
        report.check_cached(cached, 64)


def test_systems_take_turns() -> None:
    a, b = Fake(block=32), Fake(block=32)  # some words: no prompt begins like another by chance
    b.name = "other"
    told: list[str] = []
    found = report.measure([a, b], LOAD, Prompts(letters), 32, 2, told.append)
    assert [text.partition(",")[0] for text in told] == ["fake", "other"] * 5
    assert [len(found.intrusions[name]) for name in ("fake", "other")] == [2, 2]
    assert [s.cached for s in found.sharings["other"]] == [[0] + [n] * 6 for n in found.expected]
    assert sorted(a.asked) == sorted(b.asked), "not one token more for either"


@pytest.fixture
def made() -> dict[str, Any]:
    found = report.Results(
        {
            "miro": [Intrusion(60.0, 90.0, 3000.0, 2500.0), Intrusion(70.0, 80.0, 3000.0, 2000.0)],
            "fake": [Intrusion(8000.0, 9000.0, 9000.0, 9000.0), Intrusion(8000.0, 8000.0, 8000.0, 8000.0)],
        },
        {
            "miro": [Sharing(4.0, 900.0, [0, 64]), Sharing(5.0, 800.0, [0, 96])],
            "fake": [Sharing(24.0, 9000.0, None), Sharing(40.0, 9500.0, [1, 2])],
        },
        [64, 96],
    )
    return report.result_of(found, LOAD, MODEL, 2, _named("miro", "fake"))


def _named(*names: str) -> list[Any]:
    systems = [Fake() for _ in names]
    for system, name in zip(systems, names, strict=True):
        system.name = name
    return systems


def test_a_result_as_json(made: dict[str, Any]) -> None:
    made = json.loads(json.dumps(made))
    assert (made["format"], made["format_version"], made["rounds"]) == ("miro-serving", 1, 2)
    assert {"date", "machine", "model", "miro", "threads", "load"} <= set(made)
    assert made["fake"] == {"version": 1}
    assert made["long_prompt"]["miro"]["gap_max_ms"] == {"median": 85, "min": 80, "max": 90}
    assert made["long_prompt"]["miro"]["ttft_over_alone"] == {"median": 1.35, "min": 1.2, "max": 1.5}
    assert made["common_beginning"]["fake"]["cached"] == [None, [1, 2]]
    assert made["expected_cached"] == [64, 96]
    assert made["ratios"] == {
        "fake": {"gap_max": {"median": 100, "min": 100, "max": 100}, "seconds": {"median": 7, "min": 6, "max": 8}}
    }


def test_lines(made: dict[str, Any]) -> None:
    lines = list(report.lines_of(made))
    assert lines[1] == "3 streams run, a prompt of 50 words arrives:"
    assert "max 85 (80 to 90) ms; its first token 3.00 (3.00 to 3.00) s" in lines[2]
    assert lines[4].startswith("3 users, 7 requests that begin with the same 20 words")
    assert lines[-2] == "  cached tokens as they should be: 0 for the first request of a round, 64, 96 for each other"
    assert lines[-1].startswith("fake takes 7.00 (6.00 to 8.00) times as long for the common beginning")


def test_events_of_a_server() -> None:
    stream = [b"\n", b'data: {"tokens": [1], "stop": false}\n', b": comment\n", b'data: {"stop": true}\n']
    assert list(messages(stream)) == [{"tokens": [1], "stop": False}, {"stop": True}]
    for broken in (b"data: {", b"data: 7", b"data: " + b"[" * 100_000, b'data: {"error": {"message": "full"}}'):
        with pytest.raises(PeerError, match="llama-server sent"):
            list(messages([broken]))


def test_versions() -> None:
    assert version_of("noise\nversion: 123 (0a1b2c3)\nbuilt with a compiler") == "123 (0a1b2c3)"
    assert version_of("") == "unknown"


SERVER = """\
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
a = sys.argv
if "--version" in a:
    sys.exit(print("version: 7 (0a1b2c3)", file=sys.stderr))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fits = len(body["prompt"]) + body["n_predict"] <= int(a[a.index("-c") + 1]) // int(a[a.index("--parallel") + 1])
        self.send_response(200 if fits else 400)
        self.end_headers()
        for i in range(body["n_predict"] if fits else 0):
            self.wfile.write(b'data: {"tokens": [%d], "stop": false}\\n\\n' % i)
            self.wfile.flush()
        self.wfile.write(b'data: {"tokens": [], "stop": true, "timings": {"cache_n": 5}}\\n\\n')
    def log_message(self, *_):
        pass

ThreadingHTTPServer((a[a.index("--host") + 1], int(a[a.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / "server.py"))} "$@"\n')
    path.chmod(0o755)
    return path


def test_a_server_over_http(program: Path, tmp_path: Path) -> None:
    with llama_server(program, MODEL, slots=2, context=64, threads=1) as llama:
        answer = ask(llama, [1, 2, 3], 6)
        assert (answer.tokens, answer.cached) == (6, 5)
        assert ask(llama, [1, 2, 3], 50, enough=lambda: True).tokens == 1
        with pytest.raises(PeerError, match="answered 400"):
            ask(llama, [1] * 60, 6)
        assert llama.version() == {"kind": "native", "version": "7 (0a1b2c3)"}
    with pytest.raises(PeerError, match="llama-server failed"):
        ask(llama, [1, 2, 3], 6)
    with (
        pytest.raises(PeerError, match="cannot run missing"),
        llama_server(tmp_path / "missing", MODEL, slots=1, context=64, threads=1),
    ):
        pass
    program.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    with (
        pytest.raises(PeerError, match="llama-server did not start: no room"),
        llama_server(program, MODEL, slots=1, context=64, threads=1),
    ):
        pass


def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match=r"did not start: .*no model file '.*/nothing\.gguf'"),
        worker(str(tmp_path / "nothing.gguf"), context=64),
    ):
        pass
    with (
        pytest.raises(SystemExit, match="max_context must be an integer between 1 and"),
        worker(str(MODEL), context=2**30),
    ):
        pass
    (tmp_path / "log").write_bytes(b"a\n" * 10 + b"\xff" * 2000)
    assert tail(tmp_path / "log") == "\ufffd" * 1000
    (tmp_path / "log").write_bytes(b"\n")
    assert tail(tmp_path / "log") == "it said nothing"


def run(*arguments: str) -> Result:
    sizes = ("--streams", "2", "--stream-words", "3", "--stream-new", "400", "--long-words", "20", "--users", "3",
             "--requests", "7", "--prefix-words", "30", "--words", "4", "--new", "6", "--context", "512",
             "--threads", "1", "--rounds", "2")  # fmt: skip
    return CliRunner().invoke(serving.main, [str(MODEL), *sizes, *arguments])


def test_a_worker_beside_a_server(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "save", lambda made, kind: result.save(made, tmp_path, kind=kind))
    monkeypatch.setattr(report, "intrude", lambda system, load, asked: Intrusion(1.0, 1.0, 1.0, 1.0))
    done = run("--llama-server", str(program), "--json", "--save")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert list(made["common_beginning"]) == ["miro", "llama-server"]
    assert made["llama-server"] == {"kind": "native", "version": "7 (0a1b2c3)"}
    for cached, expected in zip(made["common_beginning"]["miro"]["cached"], made["expected_cached"], strict=True):
        assert cached == [0] + [expected] * 6
        assert expected >= 64
    (saved,) = tmp_path.glob("????-??-??-serving-q4-1-*.json")
    assert json.loads(saved.read_text()) == made


def test_a_worker_alone() -> None:
    done = run()
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    lines = done.stdout.splitlines()
    assert lines[1] == "2 streams run, a prompt of 20 words arrives:"
    assert lines[2].startswith("  miro          gaps p99 ")
    assert len(lines) == 6
