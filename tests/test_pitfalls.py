"""docs/pitfalls.md names tests: each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMED) > 40
    for file, name in NAMED:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_every_failure_has_a_source_and_a_test() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) == 38
    for row in rows:
        assert len(row) == 3, row
        assert re.search(r"[\w.-]+/[\w.-]+|llama\.cpp", row[0]), row[0]
        assert "::" in row[2], row[0]
