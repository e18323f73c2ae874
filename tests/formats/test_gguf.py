"""GGUF reader on sound files."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miro_cy.errors import ModelError, ModelFormatError
from miro_cy.formats.ggml_types import GGMLType
from miro_cy.formats.gguf import GGUFFile

Writer = Callable[..., Path]


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind(write_gguf: Writer, version: int) -> None:
    scalars = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5,
        "bool": True, "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1,
    }  # fmt: skip
    pairs = {kind: (kind, number) for kind, number in scalars.items()}
    pairs |= {"text": "Zürich", "empty": "", "strings": ["a", "", "東京"], "none": [], "nested": [["x", "y"], ["z"]]}
    pairs |= {"numbers": [1, 2, 3], "floats": [("f64", 0.1)], "bools": [True, False], "deep": [[1], [2, 3]]}
    with GGUFFile(write_gguf(pairs, version=version)) as file:
        meta = file.metadata
        assert file.version == version
        assert list(meta) == list(pairs)
        assert {kind: meta[kind] for kind in scalars} == scalars
        assert meta["bool"] is True
        assert (meta["text"], meta["empty"], meta["strings"]) == ("Zürich", "", ["a", "", "東京"])
        assert meta["nested"] == [["x", "y"], ["z"]]
        assert [part.tolist() for part in meta["deep"]] == [[1], [2, 3]]
        assert len(meta["none"]) == 0
        assert meta["numbers"].tolist() == [1, 2, 3]
        assert meta["floats"].dtype == np.float64
        assert meta["bools"].tolist() == [True, False]
        assert not meta["numbers"].flags.writeable
        assert "absent" not in meta


def test_get_converts_only_what_is_safe(write_gguf: Writer) -> None:
    with GGUFFile(write_gguf({"i": 3, "f": 0.5, "b": True, "s": "x", "n": [1, 2], "t": ["a"]})) as file:
        assert file.get("i", int) == 3
        assert file.get("i", float) == 3.0
        assert isinstance(file.get("i", float), float)
        assert file.get("b", bool) is True
        assert file.get("n", list) == [1, 2]
        assert file.get("n", np.ndarray).tolist() == [1, 2]
        assert file.get("t", list) == ["a"]
        assert file.get("absent", int, None) is None
        for key, kind in [("f", int), ("b", int), ("b", float), ("i", bool), ("i", str), ("s", int), ("n", int)]:
            with pytest.raises(ModelFormatError, match=f"'{key}' must be {kind.__name__}"):
                file.get(key, kind)
        with pytest.raises(ModelFormatError, match="'absent' is missing"):
            file.get("absent", int)


def test_tensors_are_views_of_the_file(write_gguf: Writer) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    quantised = bytes(range(34)) * 2
    data = matrix.tobytes().ljust(64, b"\0") + quantised
    path = write_gguf({"general.alignment": 64}, [("m", [3, 2], 0, 0), ("q", [32, 1, 2], 8, 64)], data, alignment=64)
    with GGUFFile(path) as file:
        info = file.tensors["m"]
        assert (info.shape, info.type, info.nbytes) == ((2, 3), GGMLType.F32, 24)
        assert info.offset % 64 == 0
        np.testing.assert_array_equal(file.data("m").view(np.float32).reshape(info.shape), matrix)
        assert file.tensors["q"].shape == (2, 1, 32)
        assert file.data("q").tobytes() == quantised
        assert not file.data("m").flags.writeable
        with pytest.raises(ModelFormatError, match="'absent' is missing"):
            file.data("absent")


def test_views_outlive_the_file(write_gguf: Writer) -> None:
    file = GGUFFile(write_gguf({"late": "text"}, [("t", [4], 24, 0)], b"\1\2\3\4"))
    view = file.data("t")
    file.close()
    file.close()
    assert view.tolist() == [1, 2, 3, 4]
    with pytest.raises(ModelError, match="closed"):
        file.data("t")
    del view
    file.close()
    with pytest.raises(ModelError, match="closed"):
        file.metadata["late"]


def test_released_tensors_can_be_read_again(write_gguf: Writer) -> None:
    data = os.urandom(20_000)
    path = write_gguf((), [("small", [32], 24, 0), ("large", [10_000], 24, 32)], data)
    with GGUFFile(path) as file:
        for name, expected in [("small", data[:32]), ("large", data[32:10_032])]:
            assert file.data(name).tobytes() == expected
            file.release(name)
            assert file.data(name).tobytes() == expected


def test_every_type_has_consistent_blocks() -> None:
    for kind in GGMLType:
        assert kind.block in (1, 32, 64, 128, 256)
        assert kind.block_bytes >= 1
        # No type takes more than 64 bits an element.
        assert kind.block_bytes * 8 <= 64 * kind.block
    assert GGMLType(8) is GGMLType.Q8_0
    assert (GGMLType.Q6_K.block, GGMLType.Q6_K.block_bytes) == (256, 210)


def test_float_reader_agrees_with_struct(write_gguf: Writer) -> None:
    with GGUFFile(write_gguf({"x": [0.1, 2.5]})) as file:
        assert file.metadata["x"].tolist() == list(struct.unpack("<2f", struct.pack("<2f", 0.1, 2.5)))


def test_smollm2_header(smollm2_path: Path) -> None:
    with GGUFFile(smollm2_path) as file:
        assert file.get("general.architecture", str) == "llama"
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
        embedding = file.tensors["token_embd.weight"]
        assert embedding.shape == (49152, 576)
        assert embedding.type is GGMLType.Q8_0
        assert len(file.data("token_embd.weight")) == embedding.nbytes == 49152 * 576 // 32 * 34


def test_reference_files_open(reference_data: Path) -> None:
    paths = sorted(reference_data.glob("**/*.gguf"))
    assert paths
    for path in paths:
        with GGUFFile(path) as file:
            assert dict(file.metadata)
            for name, info in file.tensors.items():
                assert len(file.data(name)) == info.nbytes
