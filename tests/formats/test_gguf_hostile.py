"""Promise 6: a model file is data. Damaged and hostile files get a typed error, at no cost in memory or time."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy.errors import ModelError, ModelFormatError, ModelNotFound, UnsupportedModel
from miro_cy.formats.gguf import GGUFFile

Builder = Callable[..., bytes]
Writer = Callable[..., Path]
HUGE = [2**31, 2**42 + 1, 2**63, 2**64 - 1]


def refused(path: Path, match: str, kind: type[ModelError] = ModelFormatError) -> None:
    with pytest.raises(kind, match=match):
        GGUFFile(path)


def u32_u64(kind: int, number: int) -> bytes:
    return struct.pack("<IQ", kind, number)


def test_missing_and_unusual_paths(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "no such model file", ModelNotFound)
    refused(tmp_path / ("x" * 300), "cannot open", ModelNotFound)
    refused(tmp_path / "nul\0", "cannot open", ModelNotFound)
    refused(tmp_path, "folder")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(pipe, "not a file")


@pytest.mark.parametrize("size", [0, 1, 4, 23])
def test_too_small(write_gguf: Writer, build_gguf: Builder, size: int) -> None:
    refused(write_gguf(build_gguf()[:size]), f"{size} bytes are too few")


def test_other_kinds_of_file(write_gguf: Writer) -> None:
    refused(write_gguf(magic=b"PK\3\4"), "not a GGUF file")
    refused(write_gguf(version=1), "version 1", UnsupportedModel)
    refused(write_gguf(version=4), "version 4", UnsupportedModel)
    refused(write_gguf(version=0), "version 0", UnsupportedModel)
    refused(write_gguf(version=3 << 24), "big-endian", UnsupportedModel)


@pytest.mark.parametrize("n", HUGE)
def test_huge_counts(write_gguf: Writer, n: int) -> None:
    n64 = min(n, 2**64 - 1)
    refused(write_gguf(n_pairs=n64), "number of metadata pairs is")
    refused(write_gguf(n_tensors=n64), "number of tensors is")
    refused(write_gguf({"s": u32_u64(8, n64)}), "string 0 of 1 is longer than the file")
    refused(write_gguf({"a": struct.pack("<IIQ", 9, 4, n64)}), "length of metadata key 'a' is")
    refused(write_gguf({"a": struct.pack("<IIQ", 9, 8, n64)}), "length of metadata key 'a' is")
    refused(write_gguf({"a": struct.pack("<IIQ", 9, 9, n64)}), "length of metadata key 'a' is")
    refused(write_gguf({"a": struct.pack("<IIQQ", 9, 8, 1, n64)}), "string 0 of 1 is longer than the file")
    refused(write_gguf((), [("t", [n64], 0, 0)], bytes(64)), "but the file ends at")
    refused(write_gguf((), [("t", [n64, n64, n64, n64], 0, 0)], bytes(64)), "but the file ends at")
    refused(write_gguf((), [("t", [4], 0, n64 // 32 * 32)], bytes(64)), "but the file ends at")


def test_lengths_of_keys_and_names(write_gguf: Writer, build_gguf: Builder) -> None:
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    refused(write_gguf(header + struct.pack("<Q", 2**63) + bytes(64)), "the limit is 65535")
    refused(write_gguf(header + struct.pack("<Q", 200) + bytes(64)), "needs 200 bytes")
    refused(write_gguf((), [("x" * 257, [4], 0, 0)], bytes(64)), "257 bytes long; the limit is 256")
    refused(write_gguf([(b"\xff", 1)]), "metadata key 0 is not valid UTF-8")
    refused(write_gguf((), [(b"\xff", [4], 0, 0)], bytes(64)), "name of tensor 0 is not valid UTF-8")


def test_metadata_that_makes_no_sense(write_gguf: Writer) -> None:
    refused(write_gguf([("a", 1), ("a", 2)]), "'a' appears twice")
    refused(write_gguf({"a": struct.pack("<II", 13, 0)}), "unknown value type 13")
    refused(write_gguf({"a": struct.pack("<IIQ", 9, 77, 0)}), "array of the unknown value type 77")
    refused(write_gguf({"a": ("u8", 1), "b": struct.pack("<IB", 7, 2)}), "bool with the value 2")
    nested: Any = [1]
    for _ in range(4):
        nested = [nested]
    refused(write_gguf({"a": nested}), "nests arrays more than 4 deep")
    bottomless = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    refused(write_gguf({"a": bottomless}), "nests arrays more than 4 deep")


def test_bad_values_are_found_when_read(write_gguf: Writer) -> None:
    pairs = {
        "text": struct.pack("<IQ", 8, 1) + b"\xff",
        "texts": struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff",
        "bools": struct.pack("<IIQ", 9, 7, 1) + b"\2",
    }
    with GGUFFile(write_gguf(pairs)) as file:
        for key in pairs:
            with pytest.raises(ModelFormatError, match=f"'{key}'"):
                file.metadata[key]


@pytest.mark.parametrize("alignment", [0, 1, 4, 7, 24, 2**21, 2**30, 2**31])
def test_alignment(write_gguf: Writer, alignment: int) -> None:
    path = write_gguf({"general.alignment": alignment}, [("t", [4], 0, 0)], bytes(64))
    refused(path, f"power of two from 8 to 1048576, not {alignment}")
    refused(write_gguf({"general.alignment": "32"}), "'general.alignment' must be int")


def test_tensors_that_make_no_sense(write_gguf: Writer) -> None:
    data = bytes(256)
    refused(write_gguf((), [("t", [], 0, 0)], data), "has 0 dimensions")
    refused(write_gguf((), [("t", [1] * 5, 0, 0)], data), "has 5 dimensions")
    refused(write_gguf((), [("t", [4, 0], 0, 0)], data), "dimension of 0")
    refused(write_gguf((), [("t", [31], 8, 0)], data), "rows of 31 elements, not a multiple of the Q8_0 block of 32")
    refused(write_gguf((), [("t", [4], 0, 16)], data), "not a multiple of the alignment 32")
    refused(write_gguf((), [("t", [4], 0, 0), ("t", [4], 0, 32)], data), "'t' appears twice")
    refused(write_gguf((), [("a", [16], 0, 0), ("b", [4], 0, 32)], data), "'a' and 'b' overlap")
    refused(write_gguf((), [("a", [4], 0, 0), ("b", [4], 0, 0)], data), "overlap")
    refused(write_gguf((), [("t", [65], 0, 0)], data), "takes 260 bytes")
    for unknown in (4, 5, 31, 2**32 - 1):
        refused(write_gguf((), [("t", [4], unknown, 0)], data), f"type id {unknown}", UnsupportedModel)


SOUND: dict[str, Any] = {"general.architecture": "llama", "a": [1, 2, 3], "s": ["xy", "z"], "general.alignment": 32}


def test_promise_a_model_file_is_data_truncated_anywhere(write_gguf: Writer, build_gguf: Builder) -> None:
    whole = build_gguf(SOUND, [("t", [8, 2], 0, 0)], bytes(64))
    GGUFFile(write_gguf(whole)).close()
    for size in range(len(whole)):
        with pytest.raises(ModelFormatError):
            GGUFFile(write_gguf(whole[:size]))


def test_promise_a_model_file_is_data_under_mutation(tmp_path: Path, build_gguf: Builder) -> None:
    """Either it opens and all of it can be read, or a typed error; never another exception, never much memory."""
    whole = build_gguf(SOUND, [("t", [8, 2], 0, 0), ("u", [32], 8, 64)], bytes(128))
    random_bytes = random.Random(20240607)
    path = tmp_path / "mutant.gguf"
    outcomes = {"opened": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(800):
            mutant = bytearray(whole)
            for _ in range(random_bytes.randint(1, 4)):
                at = random_bytes.randrange(len(mutant))
                extreme = random_bytes.choice([b"\xff", b"\0", b"\x80", bytes([random_bytes.randrange(256)])])
                width = random_bytes.choice([1, 1, 4, 8])
                mutant[at : at + width] = (extreme * width)[: len(mutant) - at]
            path.write_bytes(mutant)
            try:
                with GGUFFile(path) as file:
                    dict(file.metadata)
                    for name, info in file.tensors.items():
                        assert len(file.data(name)) == info.nbytes
                outcomes["opened"] += 1
            except ModelError:
                outcomes["refused"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    assert min(outcomes.values()) > 20, outcomes
