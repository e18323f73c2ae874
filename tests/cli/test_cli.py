"""The command line with a fake engine and a fake client: what is asked, what is printed, which exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from miro_client.cli import COMMANDS, main
from miro_cy.errors import BadField, InternalError, ModelNotFound


def test_streams_text(runner: CliRunner, engine: Any) -> None:
    result = runner.invoke(main, ["run", "Why is the sky blue?"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "The capital is Paris.\n", "")
    prompt, params = engine.asked[0]
    assert prompt == {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    assert (params.temperature, params.max_tokens) == (0.0, 512)
    assert engine.loaded[0] == "smollm2"
    assert engine.closed == 1


def test_options_reach_the_engine(runner: CliRunner, engine: Any) -> None:
    text = """
        run --model m.gguf --max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --seed 3 --stop a --stop b
        --threads 2 --compute exact --max-context 128 --system Kind. x
    """
    arguments = text.split()
    assert runner.invoke(main, arguments).exit_code == 0
    prompt, params = engine.asked[0]
    assert prompt["messages"][0] == {"role": "system", "content": "Kind."}
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 4, 0.9)
    assert (params.seed, params.stop) == (3, ("a", "b"))
    name, overrides = engine.loaded
    assert name == "m.gguf"
    assert overrides | {"threads": 2, "compute": "exact", "max_context": 128} == overrides


@pytest.mark.parametrize("mode", ["fast", "exact", "bf16"])
def test_every_compute_mode_reaches_the_engine(runner: CliRunner, engine: Any, mode: str) -> None:
    assert runner.invoke(main, ["run", "--compute", mode, "x"]).exit_code == 0
    assert engine.loaded[1]["compute"] == mode
    refused = runner.invoke(main, ["run", "--compute", mode.upper(), "x"])
    assert refused.exit_code == 2
    assert "'fast', 'exact', 'bf16'" in refused.stderr


@pytest.mark.parametrize("arguments", [["run"], ["run", "-"]])
def test_prompt_from_standard_input(runner: CliRunner, engine: Any, arguments: list[str]) -> None:
    assert runner.invoke(main, [*arguments, "--raw"], input="naïve\n\n".encode()).exit_code == 0
    assert engine.asked[0][0] == "naïve\n"


def test_json_is_one_object(runner: CliRunner, engine: Any) -> None:
    engine.words = ("né", "\x1b]0;x")
    result = runner.invoke(main, ["run", "--json", "x"])
    assert result.exit_code == 0
    assert json.loads(result.stdout_bytes) == {
        "text": "né\x1b]0;x",
        "tokens": [0, 1],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 2},
        "timing": {"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0},
    }


@pytest.mark.parametrize("where", [[], ["--connect", "ipc://a"]], ids=["here", "there"])
def test_several_answers(runner: CliRunner, client: Any, where: list[str]) -> None:
    """Each under its number, whether or not the one before ends its line; drawn, since greedy ones are all alike."""
    result = runner.invoke(main, ["run", *where, "--n", "3", "x"])
    expected = "[1]\nThe capital is Paris.\n[2]\nTHE CAPITAL IS PARIS.\n[3]\nTHE CAPITAL IS PARIS.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, expected, "")
    params = client.engine.asked[0][1]
    assert (params.n, params.temperature) == (3, 1.0)
    client.engine.words = ("a\n",)
    assert runner.invoke(main, ["run", *where, "--n", "2", "x"]).stdout == "[1]\na\n[2]\nA\n"
    assert runner.invoke(main, ["run", *where, "--n", "1", "x"]).stdout == "a\n"
    assert client.engine.asked[-1][1].temperature == 0.0


@pytest.mark.parametrize("where", [[], ["--connect", "ipc://a"]], ids=["here", "there"])
def test_several_answers_as_json(runner: CliRunner, client: Any, where: list[str]) -> None:
    fields = {"tokens": [0], "finish_reason": "stop", "timing": {"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0}}
    fields["usage"] = {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 1}
    client.engine.words = ("a",)
    drawn = json.loads(runner.invoke(main, ["run", *where, "--json", "--n", "2", "x"]).stdout)
    assert drawn == {"text": "a", **fields, "choices": [{"text": "a", **fields}, {"text": "A", **fields}]}
    found = json.loads(runner.invoke(main, ["run", *where, "--json", "--beam-width", "2", "x"]).stdout)
    assert [choice["score"] for choice in found["choices"]] == [-0.5, -1.5]
    assert (found["score"], client.engine.asked[-1][1].temperature) == (-0.5, 0.0)
    best = json.loads(runner.invoke(main, ["run", *where, "--json", "--beam-width", "4", "--n", "2", "x"]).stdout)
    assert len(best["choices"]) == 2


@pytest.mark.parametrize(("options", "want"), [([], 1), (["--n", "3"], 3), (["--beam-width", "4", "--n", "2"], 4)])
def test_an_engine_of_its_own_runs_all_answers_at_once(
    runner: CliRunner, engine: Any, options: list[str], want: int
) -> None:
    assert runner.invoke(main, ["run", *options, "x"]).exit_code == 0
    assert engine.loaded[1]["max_num_seqs"] == want


def test_several_answers_that_were_ended_fail(runner: CliRunner, engine: Any) -> None:
    engine.finish_reason = "deadline"
    result = runner.invoke(main, ["run", "--n", "2", "x"])
    assert result.exit_code == 1
    assert "(deadline)" in result.stderr


def test_without_template_the_prompt_is_plain_text(runner: CliRunner, engine: Any) -> None:
    engine.has_template = False
    assert runner.invoke(main, ["run", "hello"]).stdout == "The capital is Paris.\n"
    assert engine.asked[-1][0] == "hello"


def test_an_empty_model_is_wrong_usage(runner: CliRunner, engine: Any) -> None:
    result = runner.invoke(main, ["run", "--model", "", "x"])
    assert (result.exit_code, engine.loaded) == (2, None)
    assert "--model" in result.stderr


def test_system_message_is_never_dropped(runner: CliRunner, engine: Any) -> None:
    engine.has_template = False
    result = runner.invoke(main, ["run", "--system", "s", "hello"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "miro: error: this model has no chat template\n"


def test_default_length_yields_to_a_short_context(runner: CliRunner, engine: Any) -> None:
    engine.room = 100
    assert runner.invoke(main, ["run", "x"]).exit_code == 0
    assert [params.max_tokens for _, params in engine.asked] == [512, None]


def test_stated_length_does_not_yield(runner: CliRunner, engine: Any) -> None:
    engine.room = 100
    result = runner.invoke(main, ["run", "--max-tokens", "101", "x"])
    assert (result.exit_code, len(engine.asked)) == (1, 1)
    assert "100 tokens" in result.stderr


@pytest.mark.parametrize("where", ["default", "tcp://127.0.0.1:5555"])
def test_connect(runner: CliRunner, client: Any, where: str) -> None:
    result = runner.invoke(main, ["run", "--connect", where, "--top-k", "2", "hi"])
    assert (result.exit_code, result.stdout) == (0, "The capital is Paris.\n")
    assert client.endpoints == ["ipc:///the/default" if where == "default" else where]
    assert client.engine.loaded is None
    assert client.engine.asked[0][1].top_k == 2


def test_connect_json_has_the_same_fields(runner: CliRunner, client: Any) -> None:
    here = json.loads(runner.invoke(main, ["run", "--json", "x"]).stdout)
    there = json.loads(runner.invoke(main, ["run", "--json", "--connect", "ipc://a", "x"]).stdout)
    assert here == there


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", ""],
        ["run", "a", "b"],
        ["run", "--raw", "--system", "s", "x"],
        ["run", "--connect", "ipc://a", "--model", "m", "x"],
        ["run", "--connect", "ipc://a", "--threads", "1", "x"],
        ["run", "--connect", "somewhere", "x"],
        ["run", "--top-p", "0", "x"],
        ["run", "--temperature", "nan", "x"],
        ["run", "--max-tokens", "0", "x"],
        ["run", "--stop", "", "x"],
        ["run", "--n", "0", "x"],
        ["run", "--n", "65", "x"],
        ["run", "--n", "many", "x"],
        ["run", "--beam-width", "17", "x"],
        ["run", "--beam-width", "2", "--n", "3", "x"],
        ["run", "--beam-width", "2", "--temperature", "0.7", "x"],
        ["run", "--beam-width", "2", "--top-k", "4", "x"],
        ["run", "--beam-width", "2", "--top-p", "0.5", "x"],
        ["run", "--beam-width", "2", "--stop", "y", "x"],
        ["run", "bad \udcff byte"],
        ["run", "--nonsense", "x"],
        ["pull"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_status_2(runner: CliRunner, client: Any, arguments: list[str]) -> None:
    result = runner.invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert client.engine.asked == []


def test_standard_input_must_be_utf8(runner: CliRunner, engine: Any) -> None:
    result = runner.invoke(main, ["run"], input=b"\xff\n")
    assert result.exit_code == 2
    assert "standard input is not valid UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BadField("top_k is\nwrong \x1b[2J", field="top_k"), "miro: error: top_k is wrong \ufffd[2J\n"),
        (InternalError("broken"), "miro: error: broken\n"),
        (OSError(28, "No space left on device"), "miro: error: No space left on device\n"),
        (MemoryError(), "miro: error: out of memory\n"),
        (ZeroDivisionError("z"), "miro: error: internal error (ZeroDivisionError): z (MIRO_TRACEBACK=1 shows more)\n"),
    ],
)
@pytest.mark.parametrize("extra", [[], ["--connect", "ipc://a"]])
def test_failure_is_one_line_and_status_1(
    runner: CliRunner, client: Any, error: Exception, line: str, extra: list[str]
) -> None:
    client.engine.error = error
    result = runner.invoke(main, ["run", *extra, "x"])
    assert (result.exit_code, result.stderr) == (1, line)


def test_failure_while_loading(runner: CliRunner, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: Any) -> None:
        raise ModelNotFound(f"no {name}; fetch it with: miro pull {name}")

    monkeypatch.setattr(engine, "load", load)
    result = runner.invoke(main, ["run", "x"])
    assert (result.exit_code, result.stderr) == (1, "miro: error: no smollm2; fetch it with: miro pull smollm2\n")


def test_answer_ended_from_outside_is_a_failure(runner: CliRunner, engine: Any) -> None:
    engine.finish_reason = "cancelled"
    result = runner.invoke(main, ["run", "x"])
    assert result.exit_code == 1
    assert "cancelled" in result.stderr


def test_interrupt_is_status_130_and_ends_the_request(runner: CliRunner, engine: Any) -> None:
    engine.error = KeyboardInterrupt()
    result = runner.invoke(main, ["run", "x"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "The capital is Paris.\n", "")
    assert (engine.streams_closed, engine.closed) == (1, 1)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_shows_an_example(runner: CliRunner, command: str) -> None:
    result = runner.invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert f"miro {command} " in result.stdout


def test_pull_prints_the_path(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from miro_cy import hub

    monkeypatch.setattr(hub, "pull", lambda name, progress: tmp_path / name)
    result = runner.invoke(main, ["pull", "m"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{tmp_path / 'm'}\n", "")


@pytest.mark.parametrize(
    ("arguments", "temperature"),
    [((), 0.0), (("--top-k", "5"), 1.0), (("--seed", "3"), 1.0), (("--seed", "3", "--temperature", "0"), 0.0)],
)
def test_asking_for_draws_is_not_greedy(arguments: tuple[str, ...], temperature: float) -> None:
    from miro_client.cli.run import _question

    command = main.get_command(click.Context(main), "run")
    assert command is not None
    context = command.make_context("run", ["x", *arguments])
    assert _question("x", context.params).sampling["temperature"] == temperature
