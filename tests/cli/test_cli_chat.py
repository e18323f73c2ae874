"""`miro chat` through a pipe, with a fake engine and a fake client: what is asked, printed, remembered, dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from miro_client.cli import main
from miro_client.cli.chat import MAX_TOKENS, SAMPLING
from miro_client.errors import BadField, ConnectionLost, InternalError, MiroError, Restarted
from miro_cy.requests import Event
from miro_cy.sampling.params import SamplingParams

ANSWER = "The capital is Paris."


@pytest.fixture
def chat(runner: CliRunner, engine: Any) -> Any:
    def talk(lines: str, *arguments: str) -> Result:
        return runner.invoke(main, ["chat", *arguments], input=lines)

    return talk


def asked(engine: Any) -> list[list[tuple[str, str]]]:
    """The messages of each request, as (role, content)."""
    return [[(m["role"], m["content"]) for m in prompt["messages"]] for prompt, _ in engine.asked]


def test_each_question_is_asked_with_what_was_said_before(chat: Any, engine: Any) -> None:
    result = chat("one\n\n  \ntwo\nthree", "--system", "Be kind.")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{ANSWER}\n" * 3, "")
    first = [("system", "Be kind."), ("user", "one")]
    second = [*first, ("assistant", ANSWER), ("user", "two")]
    assert asked(engine) == [first, second, [*second, ("assistant", ANSWER), ("user", "three")]]
    assert engine.closed == 1


def test_json_is_an_object_for_each_question(chat: Any, engine: Any) -> None:
    result = chat("one\ntwo\n", "--json")
    assert result.exit_code == 0
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [set(o) for o in objects] == [{"text", "tokens", "finish_reason", "usage", "timing"}] * 2
    assert objects[1]["text"] == ANSWER


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        ('"""\none\n  two\n"""\n', "one\n  two"),
        ('"""one\ntwo"""\n', "one\ntwo"),
        ('  """one"""\n', "one"),
        ('"""\n/clear\n\\\n"""  \n', "/clear\n\\"),
        ("one\\\ntwo\\\nthree\n", "one\ntwo\nthree"),
        ("one\\\n", "one"),
        ("one\r\n", "one"),
        ("/etc/passwd holds what?\n", "/etc/passwd holds what?"),
        (" /clear\n", " /clear"),
        ("naïve \U0001f600\n", "naïve \U0001f600"),
    ],
)
def test_a_question_may_take_several_lines(chat: Any, engine: Any, lines: str, question: str) -> None:
    assert chat(lines).exit_code == 0
    assert asked(engine) == [[("user", question)]]


def test_an_open_block_is_an_error(chat: Any, engine: Any) -> None:
    result = chat('one\n"""\ntwo\n')
    assert (result.exit_code, result.stdout) == (1, f"{ANSWER}\n")
    assert result.stderr == 'miro: error: standard input ends inside a block of """\n'


def test_standard_input_must_be_utf8(runner: CliRunner, engine: Any) -> None:
    result = runner.invoke(main, ["chat"], input=b"one\n\xff\n")
    assert (result.exit_code, len(engine.asked)) == (1, 1)
    assert result.stderr == "miro: error: standard input is not valid UTF-8\n"


def test_commands(chat: Any, engine: Any) -> None:
    one, answer = ("user", "one"), ("assistant", ANSWER)
    for lines, expected in (
        ("one\n/clear\ntwo\n", [[one], [("user", "two")]]),
        ("one\ntwo\n/undo\nthree\n", [[one], [one, answer, ("user", "two")], [one, answer, ("user", "three")]]),
        ("one\n/retry\n/retry \ntwo\n", [[one]] * 3 + [[one, answer, ("user", "two")]]),
        ("/system Kind.\none\n/system\n/clear\none\n", [[("system", "Kind."), one], [one]]),
        ("one\n/exit\ntwo\n", [[one]]),
        ("one\n/quit now\ntwo\n", [[one]]),
    ):
        engine.asked.clear()
        result = chat(lines)
        assert (result.exit_code, result.stderr) == (0, ""), lines
        assert asked(engine) == expected


def test_help_lists_the_commands_beside_the_answers(chat: Any, engine: Any) -> None:
    result = chat("/help\n")
    assert (result.exit_code, result.stdout, engine.asked) == (0, "", [])
    for word in ("/retry", "/undo", "/clear", "/system", "/exit", "Ctrl-C", '"""', "backslash"):
        assert word in result.stderr


@pytest.mark.parametrize("line", ["/nonsense", "/undo", "/retry"])
def test_a_command_that_cannot_be_done_is_not_a_question(chat: Any, engine: Any, line: str) -> None:
    result = chat(f"{line}\none\n")
    assert (result.exit_code, result.stdout, asked(engine)) == (1, f"{ANSWER}\n", [[("user", "one")]])
    assert result.stderr.startswith("miro: error: ")
    assert line in result.stderr


class Faulty:
    """Put in place of an engine's `stream`: questions that name a fault end with it, after a first word."""

    def __init__(self, faults: dict[str, MiroError]) -> None:
        self.faults = faults
        self.messages: list[Any] = []

    def __call__(self, prompt: Any, params: SamplingParams) -> Iterator[Event]:
        self.messages.append([m["content"] for m in prompt["messages"]])
        fault = self.faults.get(prompt["messages"][-1]["content"])
        yield Event(1, text="word", tokens=[1])
        yield Event(1, finish_reason="stop" if fault is None else "error", error=fault)


def test_a_question_that_fails_is_dropped_and_the_next_one_is_asked(
    chat: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty({"two": InternalError("broken")})
    monkeypatch.setattr(engine, "stream", lambda self, *a: faulty(*a))
    result = chat("one\ntwo\nthree\n/retry\n")
    assert faulty.messages == [["one"], ["one", "word", "two"], ["one", "word", "three"], ["one", "word", "three"]]
    assert (result.exit_code, result.stdout) == (1, "word\n" * 4)
    assert result.stderr == "miro: error: broken\nmiro: error: not every question was answered\n"
    result = chat("two\n/retry\none\n", "--json")
    assert faulty.messages[-3:] == [["two"], ["two"], ["one"]]
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert objects[:2] == [{"error": "broken", "type": "InternalError"}] * 2
    assert (objects[2]["text"], result.exit_code) == ("word", 1)


@pytest.mark.parametrize("error", [ConnectionLost("gone"), Restarted("stopped")])
def test_a_worker_that_goes_away_ends_a_piped_chat(
    chat: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, error: MiroError
) -> None:
    faulty = Faulty({"two": error})
    monkeypatch.setattr(engine, "stream", lambda self, *a: faulty(*a))
    result = chat("one\ntwo\nthree\n", "--json")
    assert (result.exit_code, len(faulty.messages)) == (1, 2)
    assert json.loads(result.stdout.splitlines()[1]) == {"error": str(error), "type": type(error).__name__}
    assert result.stderr == f"miro: error: {error}\n"


def test_a_conversation_too_long_for_the_context_loses_the_question_alone(chat: Any, engine: Any) -> None:
    engine.room = 100
    result = chat("one\ntwo\n", "--max-tokens", "101")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("miro: error: prompt and max_tokens need more than 100 tokens (the question is") == 2
    assert asked(engine) == [[("user", "one")], [("user", "two")]]
    engine.asked.clear()
    assert chat("one\n").exit_code == 0
    assert [params.max_tokens for _, params in engine.asked] == [MAX_TOKENS, None]


def test_a_model_without_a_template_is_refused_at_the_start(chat: Any, engine: Any, client: Any) -> None:
    engine.has_template = False
    result = chat("one\n")
    assert (result.exit_code, result.stdout, engine.asked) == (1, "", [])
    assert "fake has no chat template" in result.stderr
    result = chat("one\n", "--connect", "default")
    assert (result.exit_code, engine.asked) == (1, [])
    assert "fake has no chat template" in result.stderr


def test_a_refused_question_does_not_end_the_chat(chat: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty({"one": BadField("no system message, please", field="messages")})
    monkeypatch.setattr(engine, "stream", lambda self, *a: faulty(*a))
    assert chat("one\ntwo\n").exit_code == 1
    assert faulty.messages == [["one"], ["two"]]


@pytest.mark.parametrize(
    ("recommended", "arguments", "expected"),
    [
        ({}, (), (SAMPLING["temperature"], 0, SAMPLING["top_p"])),
        ({"temperature": 0.6, "top_k": 20}, (), (0.6, 20, 1.0)),
        ({"temperature": 0.6, "top_k": 20}, ("--temperature", "0.2", "--top-p", "0.5"), (0.2, 20, 0.5)),
        ({"temperature": 0.0}, (), (0.0, 0, 1.0)),
        ({"temperature": 0.0}, ("--seed", "3"), (1.0, 0, 1.0)),
        ({}, ("--temperature", "0"), (0.0, 0, SAMPLING["top_p"])),
    ],
)
def test_sampling_is_what_the_model_recommends_unless_told(
    chat: Any, engine: Any, recommended: dict[str, float], arguments: tuple[str, ...], expected: tuple[float, ...]
) -> None:
    engine.generation = SimpleNamespace(sampling=recommended)
    assert chat("one\n", *arguments).exit_code == 0
    params = engine.asked[0][1]
    assert (params.temperature, params.top_k, params.top_p) == expected


def test_run_stays_greedy_whatever_the_model_recommends(runner: CliRunner, engine: Any) -> None:
    engine.generation = SimpleNamespace(sampling={"temperature": 0.6})
    assert runner.invoke(main, ["run", "one"]).exit_code == 0
    assert engine.asked[0][1].temperature == 0


def test_connect(chat: Any, client: Any) -> None:
    result = chat("one\ntwo\n", "--connect", "default", "--seed", "4")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{ANSWER}\n" * 2, "")
    assert client.endpoints == ["ipc:///the/default"]
    assert client.engine.loaded is None
    assert [len(messages) for messages in asked(client.engine)] == [1, 3]
    params = client.engine.asked[0][1]
    assert (params.temperature, params.top_p, params.seed) == (*SAMPLING.values(), 4)


@pytest.mark.parametrize(
    "arguments",
    [["--connect", "ipc://a", "--model", "m"], ["--top-p", "nan"], ["--system", ""], ["--raw"], ["question"]],
)
def test_wrong_usage_is_status_2(chat: Any, engine: Any, arguments: list[str]) -> None:
    result = chat("one\n", *arguments)
    assert (result.exit_code, result.stdout, engine.loaded) == (2, "", None)


def test_an_interrupt_ends_a_piped_chat(chat: Any, engine: Any) -> None:
    """A file of questions needs one Ctrl-C, not one for each of them."""
    engine.error = KeyboardInterrupt()
    result = chat("one\ntwo\n")
    assert result.exit_code == 130
    assert len(engine.asked) == 1
