"""Binding an ipc socket that only its owner can use, without taking it from a worker that is alive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from miro_client.checks import shown
from miro_client.endpoint import check_endpoint, check_private, default_endpoint
from miro_client.errors import ConfigError, Unavailable

SCHEME = "ipc://"
#: How long another worker may take to bind in the same folder.
LOCK_S = 5.0


def bind_ipc(router: zmq.Socket[Any], endpoint: str | None) -> str:
    """Bind and return the endpoint; None means the default one, whose private folder is made if need be.

    Raises ConfigError if the endpoint is not ipc, is held by a live worker, or cannot be bound. A socket file that a
    dead worker left behind is replaced; any other file is left alone.
    """
    if endpoint is None:
        endpoint = default_endpoint()
        folder = Path(endpoint.removeprefix(SCHEME)).parent
        try:
            folder.mkdir(mode=0o700, parents=False, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the socket's folder {str(folder)!r}: {error.strerror}", field="bind"
            ) from None
        check_private(folder)
    check_endpoint(endpoint, field="bind")
    path = endpoint.removeprefix(SCHEME)
    if not endpoint.startswith(SCHEME) or not path or path[0] in "@*":
        raise ConfigError(f"only ipc://PATH endpoints are supported, not {endpoint!r:.200}", field="bind")
    with _exclusive(Path(os.path.dirname(path) or ".")):
        _check_free(path)
        # ZeroMQ removes whatever lies at the path, then creates the socket file: for its owner only.
        umask = os.umask(0o177)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)  # not error.strerror, which repeats the endpoint
            raise ConfigError(f"cannot bind {shown(endpoint, 200)}: {reason}", field="bind") from None
        finally:
            os.umask(umask)
    return endpoint


class IpcFile:
    """The socket file of a bound endpoint. ZeroMQ leaves it behind."""

    def __init__(self, endpoint: str) -> None:
        self._path = endpoint.removeprefix(SCHEME)
        self._identity = self._look()

    def remove(self) -> None:
        """Remove it, before the socket closes and unless something else has taken its place."""
        if self._identity is not None and self._look() == self._identity:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _look(self) -> tuple[int, int] | None:
        try:
            status = os.lstat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the folder, so that of two workers that start at once the second sees the first one's socket."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot bind in {folder}: {error.strerror}", field="bind") from None
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                raise Unavailable(f"{folder} is locked by another process", field="bind") from None
        time.sleep(0.02)


def _check_free(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot bind {path!r:.200}: {error}", field="bind") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket", field="bind")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            result = probe.connect_ex(path)
        except OSError as error:
            raise ConfigError(f"cannot bind {path!r:.200}: {error}", field="bind") from None
    # Only a refusal proves that nobody listens; a full backlog (EAGAIN) is a busy worker.
    if result not in (errno.ECONNREFUSED, errno.ENOENT):
        raise Unavailable(f"{path} is in use by another worker", field="bind")
