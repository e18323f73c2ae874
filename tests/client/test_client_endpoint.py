"""Where a client connects to, and which endpoints it refuses."""

from __future__ import annotations

import pytest

from miro_client import Client, default_endpoint
from miro_client.errors import (
    ConfigError,
)


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/\ud800", "\ud800", "ipc:///tmp/a\0b", 5, b"ipc:///tmp/a", "", "nonsense"]
)
def test_endpoints_that_cannot_be_used(endpoint):
    with pytest.raises(ConfigError) as caught:
        Client(endpoint)
    assert caught.value.field == "endpoint"


def test_a_default_folder_that_is_a_file(monkeypatch, folder):
    (folder / "miro").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(ConfigError, match="not a directory"):
        Client()


def test_the_default_endpoint(monkeypatch, folder):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_endpoint() == f"ipc://{folder}/miro/miro.sock"
    for unusable in ("", "relative/dir"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert default_endpoint().startswith("ipc:///tmp/miro-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "miro").mkdir(mode=0o777)
    (folder / "miro").chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        Client()
