"""`miro inspect` on real, small models."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from miro_client.cli import main
from miro_client.cli.console import print_json
from miro_cy.inspect import LayerGroup, inspect_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FOLDER, FILE = str(GOLDEN / "hf" / "llama"), str(GOLDEN / "gguf" / "Q4_1.gguf")
SLIDING = str(GOLDEN / "hf" / "mistral-swa")


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which always as much memory is free."""
    monkeypatch.setattr("miro_cy.inspect.available_memory", lambda: 10**9)


@pytest.fixture(params=[True, False], ids=["tiles", "no-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As if the machine had tile registers, or had none: nothing is loaded here."""
    for module in ("inspect", "loading"):
        monkeypatch.setattr(f"miro_cy.{module}.has_tiles", lambda: request.param)
    given: bool = request.param
    return given


def test_table(runner: CliRunner, tiles: bool) -> None:
    """The element types that an engine on this machine may have, and which it has unless told."""
    result = runner.invoke(main, ["inspect", FILE, "--context", "256"])
    assert (result.exit_code, result.stderr) == (0, "")
    memory, capacity = result.stdout.split("capacity")
    lines = {line[:18].strip(): line[18:] for line in memory.splitlines()}
    assert lines["format"] == "GGUF 3, architecture llama"
    assert lines["heads"] == "4 of 64 dimensions, 2 for keys and values"
    assert "Q4_1" in lines
    cache = "1,024 bytes a token in fp16, 2,048 in fp32, 544 in int8"
    assert lines["KV cache"] == cache + (", 1,024 in bf16" if tiles else "")
    assert lines["memory"] == "at 256 tokens:"
    labels = ["fp16", "fp32", "int8", "bf16 (default)"] if tiles else ["fp16 (default)", "fp32", "int8"]
    assert lines[labels[-1] if tiles else labels[0]].endswith("+ KV cache 262.1 kB")
    assert [line.strip() for line in capacity.splitlines()] == [
        "with the default share of the 1.0 GB that are free here:",
        *(f"{label:<16}2,048 tokens for a worker, 512 in a program" for label in labels),
    ]


def test_what_fits(runner: CliRunner, tiles: bool) -> None:
    result = runner.invoke(main, ["inspect", FILE, "--fit", "24GiB"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if line.startswith("fit") or " tokens in " in line]
    fit = inspect_model(FILE, fit="24GiB").fit["fp16"]
    assert lines[0].split(maxsplit=1)[1].startswith("25,769,803,776 bytes: weights ")
    labels = ["fp16", "fp32", "int8", "bf16 (default)"] if tiles else ["fp16 (default)", "fp32", "int8"]
    assert [line[:18].strip() for line in lines[1:]] == labels
    assert lines[1][18:] == f"{fit.tokens:,} tokens in 25.8 GB: {fit.sequences:,} sequences of 512"
    assert not tiles or lines[4][18:] == lines[1][18:], "heads of 64 dimensions need no padding"
    result = runner.invoke(main, ["inspect", FILE, "--fit", "24GiB", "--json"])
    assert json.loads(result.stdout)["fit"]["fp16"] == asdict(fit)
    for size in ("lots", "1MB", "0"):
        result = runner.invoke(main, ["inspect", FILE, "--fit", size])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "fit " in result.stderr
    assert runner.invoke(main, ["inspect", "--connect", "default", "--fit", "1GiB"]).exit_code == 2


def test_what_fits_of_a_context(runner: CliRunner) -> None:
    result = runner.invoke(main, ["inspect", FILE, "--fit", "24GiB", "--context", "64"])
    fit = inspect_model(FILE, 64, "24GiB").fit["fp16"]
    assert f"{fit.tokens:,} tokens in 25.8 GB: {fit.tokens // 64:,} sequences of 64\n" in result.stdout
    least = inspect_model(FILE, 64).memory["fp16"]
    size = str(least.weights + least.activations + 32 * 1024)
    result = runner.invoke(main, ["inspect", FILE, "--fit", size, "--context", "64"])
    assert "32 tokens in 32.8 kB: sequences of up to 32\n" in result.stdout


def test_windows(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that see 24 tokens: two blocks of 32 for a sequence of any length."""
    result = runner.invoke(main, ["inspect", SLIDING, "--fit", "1GiB", "--context", "500"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "windows           2 layers x 24 tokens" in lines
    assert sum(line.endswith("+ KV cache 32.8 kB (262.1 kB without windows)") for line in lines) == 1
    tokens = "2,048 tokens for a worker, 512 in a program: 32 and 8 sequences of 500, 4 and 1 without windows"
    assert f"fp32 (default)  {tokens}" in lines
    fit = inspect_model(SLIDING, 500, "1GiB").fit["int8"]
    many = f"{fit.tokens // 64:,} sequences of 500, {fit.tokens // 512:,} without windows"
    assert f"int8            {fit.tokens:,} tokens in 1.1 GB: {many}" in lines

    mixed = replace(inspect_model(SLIDING), kv_groups=[LayerGroup(4, 0), *[LayerGroup(4, 1024)] * 5, LayerGroup(1, 9)])
    monkeypatch.setattr("miro_cy.inspect.inspect_model", lambda *_: mixed)
    result = runner.invoke(main, ["inspect", SLIDING])
    assert "windows           4 layers x all tokens, 5 groups of 4 layers x 1,024 tokens, 1 layer x 9 tokens\n" in (
        result.stdout
    )
    result = runner.invoke(main, ["inspect", SLIDING, "--json"])
    assert json.loads(result.stdout)["kv_groups"][:2] == [{"layers": 4, "window": 0}, {"layers": 4, "window": 1024}]


def test_json(runner: CliRunner) -> None:
    result = runner.invoke(main, ["inspect", FOLDER, "--json", "--context", "64"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == asdict(inspect_model(FOLDER, 64))


def test_failures(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(main, ["inspect", FOLDER, "--context", "513"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "context must be an integer between 1 and 512, not 513\n" in result.stderr
    assert runner.invoke(main, ["inspect", str(tmp_path)]).exit_code == 1
    assert runner.invoke(main, ["inspect", FOLDER, "--context", "0"]).exit_code == 2
    assert runner.invoke(main, ["inspect"]).exit_code == 2


def test_a_name_cannot_write_to_the_terminal(runner: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "x\x1b]0;title\n.gguf"
    shutil.copy(FILE, path)
    result = runner.invoke(main, ["inspect", str(path)])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert len([line for line in result.stdout.splitlines() if line.startswith("model")]) == 1


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_name_that_is_not_unicode_is_printed_as_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\x9b.gguf"
    shutil.copy(FILE, path)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as end:
        main(["inspect", os.fsdecode(path), *arguments])
    text = out.buffer.getvalue().decode()
    assert end.value.code == 0
    if arguments:
        assert json.loads(text)["path"].startswith(str(tmp_path))
    else:
        assert text.splitlines()[0].split() == ["model", "\ufffd\ufffd"]


def test_json_is_utf8_whatever_it_holds(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    print_json({"name": "é\udcff\ud800"})
    assert json.loads(capsysbinary.readouterr().out.decode()) == {"name": "é??"}
