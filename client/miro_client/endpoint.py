"""Where a worker listens unless told otherwise. Standard library only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from miro_client.checks import shown
from miro_client.errors import ConfigError


def default_endpoint() -> str:
    """The endpoint that worker and client use when none is given: a socket in a folder that only this user can enter.

    $XDG_RUNTIME_DIR/miro/miro.sock, else /tmp/miro-<uid>/miro.sock. Nothing is created.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # A relative path must be ignored (XDG base directory specification).
    folder = Path(runtime, "miro") if os.path.isabs(runtime) else Path(f"/tmp/miro-{os.getuid()}")
    return f"ipc://{folder / 'miro.sock'}"


def control_endpoint(endpoint: str) -> str:
    """Where the worker of a data endpoint answers STATS, HEALTH and MODELS."""
    return f"{endpoint}.control"


def admin_endpoint(endpoint: str) -> str:
    """Where the worker of a data endpoint takes DRAIN."""
    return f"{endpoint}.admin"


def check_endpoint(endpoint: object, *, field: str = "endpoint") -> None:
    """Raise ConfigError unless `endpoint` is text that ZeroMQ can take: a str of valid UTF-8, without NUL."""
    if not isinstance(endpoint, str):
        raise ConfigError(f"an endpoint is a string such as ipc:///tmp/miro.sock, not {shown(endpoint)}", field=field)
    try:
        usable = b"\0" not in endpoint.encode()
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ConfigError(f"an endpoint is UTF-8 text without NUL, not {shown(endpoint, 200)}", field=field)


def check_private(folder: Path) -> None:
    """Raise ConfigError unless `folder` is a real directory that belongs to this user and to nobody else.

    In /tmp anybody can create the folder first, and would then read every prompt.
    """
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {str(folder)!r}: {error.strerror}", field="endpoint") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a directory", field="endpoint")
    if status.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to user {status.st_uid}, not to this one", field="endpoint")
    if status.st_mode & 0o022:
        raise ConfigError(f"{folder} can be written by others (mode {status.st_mode & 0o777:o})", field="endpoint")
