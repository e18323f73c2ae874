"""Safetensors files and folders: sound ones, and promise 6: damaged and hostile ones get a typed error, at no cost."""

from __future__ import annotations

import json
import os
import random
import runpy
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miro_cy.errors import ModelError, ModelFormatError, ModelNotFound, UnsupportedModel
from miro_cy.formats.safetensors import INDEX, SINGLE, SafetensorsFile, SafetensorsFolder, safetensors_in

build: Callable[..., bytes] = runpy.run_path(str(Path(__file__).parents[1] / "safetensors_bytes.py"))[
    "build_safetensors"
]
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
SOUND: dict[str, tuple[str, list[int], bytes]] = {
    "a.weight": ("F32", [2, 3], MATRIX.tobytes()),
    "b": ("BF16", [4], bytes(range(8))),
    "c": ("I64", [1, 1, 1], bytes(8)),
    "empty": ("F16", [0, 4], b""),
}


def refused(path: Path, content: bytes, match: str, kind: type[ModelError] = ModelFormatError) -> None:
    path.write_bytes(content)
    with pytest.raises(kind, match=match):
        SafetensorsFile(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("pad", [1, 8, 64])
def test_tensors_are_views_of_the_file(path: Path, pad: int) -> None:
    path.write_bytes(build(SOUND, pad=pad))
    file = SafetensorsFile(path)
    assert {name: (info.kind, info.shape) for name, info in file.tensors.items()} == {
        name: (kind, tuple(shape)) for name, (kind, shape, _) in SOUND.items()
    }
    for name, (_, _, raw) in SOUND.items():
        assert file.data(name).tobytes() == raw
        assert file.tensors[name].nbytes == len(raw)
        file.release(name)
        assert file.data(name).tobytes() == raw
    aligned = file.data("a.weight")
    np.testing.assert_array_equal(aligned.view(np.float32).reshape(2, 3), MATRIX)
    assert aligned.ctypes.data % 4 == 0
    file.close()
    assert aligned.tobytes() == MATRIX.tobytes()  # a view outlives the file
    with pytest.raises(ModelError, match="closed"):
        file.data("b")


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory now."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_released_memory_is_given_back(path: Path) -> None:
    size = 8 * 2**20
    path.write_bytes(build({"large": ("I8", [size], bytes(size))}))
    file = SafetensorsFile(path)
    assert resident(path) < size // 2  # nothing but the header was read
    assert not file.data("large").any()
    assert resident(path) >= size // 2
    file.release("large")
    assert resident(path) < size // 2
    file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()  # nor does the library keep it


def test_missing_and_unusual_paths(tmp_path: Path) -> None:
    for name, kind in [("absent", ModelNotFound), ("x" * 300, ModelNotFound), ("nul\0", ModelNotFound)]:
        with pytest.raises(kind):
            SafetensorsFile(tmp_path / name)
    with pytest.raises(ModelFormatError, match="folder"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFormatError, match="not a file"):
        SafetensorsFile(tmp_path / "pipe")


@pytest.mark.parametrize("size", [0, 1, 7])
def test_too_small(path: Path, size: int) -> None:
    refused(path, bytes(size), f"{size} bytes are too few")


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**63, 2**64 - 1])
def test_header_lengths(path: Path, length: int) -> None:
    refused(path, build(SOUND, length=length), "not a sound safetensors file")


@pytest.mark.parametrize("header", [b"", b"[]", b"null", b"{", b'{"a":', b'{"a": 1}', b"\xff\xfe{}", b"[" * 5000])
def test_headers_that_are_no_object(path: Path, header: bytes) -> None:
    refused(path, build(header=header, data=b""), "not a sound safetensors file")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [2], "data_offsets": [2**63, 2**63 + 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "Q4_0", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": 0, "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
    ],
)
def test_entries_that_make_no_sense(path: Path, entry: dict[str, Any]) -> None:
    refused(path, build(header={"t": entry}, data=bytes(8)), "x.safetensors")


def test_places_that_overlap_or_leave_holes(path: Path) -> None:
    def entry(begin: int, end: int) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}

    for places in ([(0, 8), (4, 12)], [(0, 8), (0, 8)], [(0, 4), (8, 12)], [(0, 4)], [(4, 12)], [(0, 16)]):
        header = {f"t{i}": entry(*place) for i, place in enumerate(places)}
        refused(path, build(header=header, data=bytes(12)), "x.safetensors")


def test_a_header_that_changes_after_the_library_read_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own check stands by itself: the library is made to see a sound file, the map holds another."""
    from miro_cy.formats import safetensors as module

    sound = path.with_name("sound.safetensors")
    sound.write_bytes(build({"t": ("F32", [2], bytes(8)), "u": ("F32", [2], bytes(8))}))
    library = module.safe_open
    monkeypatch.setattr(module, "safe_open", lambda _, framework: library(sound, framework=framework))

    def places(t: Any, u: Any) -> bytes:
        return build(header={"t": {"data_offsets": t}, "u": {"data_offsets": u}}, data=bytes(16))

    refused(path, places([0, 8], [4, 12]), "'t' and 'u' overlap")
    refused(path, places([0, 8], [16, 24]), "'u' lies at 16 to 24 of 16 bytes")
    refused(path, places([-8, 0], [8, 16]), "'t' lies at -8 to 0")
    refused(path, places([0, 4], [8, 16]), "'t' has 4 bytes, F32 of shape")
    refused(path, places("x", [8, 16]), "'t' has no place")
    refused(path, build(header={"t": {"data_offsets": [0, 8]}}, data=bytes(16)), "'u' has no place")
    refused(path, build(header=b"[1]", data=bytes(16)), "must hold a JSON object")
    refused(path, struct.pack("<Q", 2**63) + bytes(64), "the header takes")


def test_element_types_without_a_size_here(path: Path) -> None:
    refused(path, build({"t": ("F4", [4], bytes(2))}), "'t' has the type F4", UnsupportedModel)


def test_promise_a_model_file_is_data_truncated_anywhere(path: Path) -> None:
    whole = build(SOUND)
    for size in range(len(whole)):
        refused(path, whole[:size], "x.safetensors")
    refused(path, whole + b"\0", "x.safetensors")


def test_promise_a_model_file_is_data_under_mutation(path: Path) -> None:
    """Either it opens and all of it can be read, or a typed error; never another exception, never much memory."""
    whole = build(SOUND)
    draw = random.Random(20240607)
    outcomes = {"opened": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(600):
            mutant = bytearray(whole)
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(mutant))
                width = draw.choice([1, 1, 1, 4, 8])
                extreme = draw.choice([b"\xff", b"\0", b"9", b"0", b"[", b'"', bytes([draw.randrange(256)])])
                mutant[at : at + width] = (extreme * width)[: len(mutant) - at]
            path.write_bytes(mutant)
            try:
                file = SafetensorsFile(path)
                for name, info in file.tensors.items():
                    assert len(file.data(name)) == info.nbytes
                file.close()
                outcomes["opened"] += 1
            except ModelError:
                outcomes["refused"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    assert min(outcomes.values()) > 20, outcomes


# --- folders -----------------------------------------------------------------------------------------------------


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "one.safetensors").write_bytes(build({"a": SOUND["a.weight"]}))
    (tmp_path / "two.safetensors").write_bytes(build({"b": SOUND["b"], "c": SOUND["c"]}))
    return tmp_path


def test_an_index_over_several_files(shards: Path) -> None:
    write_index(shards, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    folder = SafetensorsFolder(shards)
    assert set(folder.tensors) == {"a", "b", "c"}
    assert folder.data("a").tobytes() == MATRIX.tobytes()
    assert folder.data("b").tobytes() == SOUND["b"][2]
    assert {path.name for path in folder.files} == {INDEX, "one.safetensors", "two.safetensors"}
    folder.release("c")
    with pytest.raises(ModelFormatError, match="'d' is missing"):
        folder.data("d")
    folder.close()


@pytest.mark.parametrize(
    ("weight_map", "kind", "match"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, ModelFormatError, "'c' is extra"),
        ({"a": "one.safetensors", "d": "one.safetensors"}, ModelFormatError, "'d' is missing"),
        ({"a": "two.safetensors"}, ModelFormatError, "'a' is missing"),
        ({"a": "three.safetensors"}, ModelNotFound, "three.safetensors"),
        ({"a": "../one.safetensors"}, ModelFormatError, "no .safetensors file here"),
        ({"a": "/etc/passwd"}, ModelFormatError, "no .safetensors file here"),
        ({"a": "one.bin"}, ModelFormatError, "no .safetensors file here"),
        ({"a": "nul\0.safetensors"}, ModelNotFound, "cannot open"),
        ({"a": 1}, ModelFormatError, "no .safetensors file here"),
        ({}, ModelFormatError, "weight_map"),
        ([], ModelFormatError, "weight_map"),
    ],
)
def test_an_index_that_the_files_contradict(shards: Path, weight_map: Any, kind: Any, match: str) -> None:
    write_index(shards, weight_map)
    with pytest.raises(kind, match=match):
        SafetensorsFolder(shards)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"weight_map": ' + b"9" * 5000 + b"}"]
)
def test_an_index_that_is_no_object(shards: Path, content: bytes) -> None:
    (shards / INDEX).write_bytes(content)
    with pytest.raises(ModelFormatError, match=INDEX):
        SafetensorsFolder(shards)


def test_which_file_of_a_folder(shards: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"2 \.safetensors files and no"):
        SafetensorsFolder(shards)
    (shards / "two.safetensors").unlink()
    assert set(SafetensorsFolder(shards).tensors) == {"a"}
    (shards / SINGLE).write_bytes(build({"single": SOUND["b"]}))
    assert set(SafetensorsFolder(shards).tensors) == {"single"}
    assert [path.name for path in safetensors_in(shards)] == [SINGLE, "one.safetensors"]
    empty = shards / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFound, match=r"no \.safetensors file"):
        SafetensorsFolder(empty)
