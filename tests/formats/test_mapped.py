"""Small JSON files are read within a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from miro_cy.errors import ModelFormatError
from miro_cy.formats import mapped


def test_json_files_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [1, 2]}')
    assert mapped.read_json(path) == {"a": [1, 2]}
    monkeypatch.setattr(mapped, "MAX_JSON_BYTES", 12)
    with pytest.raises(ModelFormatError, match="larger than 12 bytes"):
        mapped.read_json(path)
