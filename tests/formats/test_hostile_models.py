"""Promise 6, for whole models: damaged in any of their files, they are refused by name, or load and answer.

The long version of this, thousands of mutants on the debug build, is in tests/long.
"""

from __future__ import annotations

import base64
import json
import runpy
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.errors import BadField, ModelError, RequestError
from miro_cy.formats.safetensors import INDEX
from miro_cy.text import load_tokenizer

TESTS = Path(__file__).parents[1]
_LOADERS = runpy.run_path(str(TESTS / "long" / "loaders.py"))
hostile_folders, model_bytes, tokenizer_json = map(_LOADERS.get, ("hostile_folders", "model_bytes", "tokenizer_json"))
text_model = runpy.run_path(str(TESTS / "engine" / "conftest.py"))["text_model"]
load_mutants: Callable[..., Any] = _LOADERS["load_mutants"]
MUTANTS = 160
SECONDS = 100
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
DEPTH = 200_000


def test_promise_a_model_file_is_data_under_seeded_mutations(
    tmp_path: Path, hostile_folders: list[Path], text_model: Path
) -> None:
    data = TESTS / "data" / "golden"
    golden = [*sorted((data / "gguf").glob("*.gguf")), data / "hf" / "qwen3" / "model-f32.gguf"]
    kinds = load_mutants(tmp_path, [*golden, text_model, *hostile_folders], MUTANTS, SECONDS, processes=2)
    assert kinds["refused"] > MUTANTS / 4, kinds
    assert kinds["answered"] > MUTANTS / 10, kinds


# --- one file at a time ------------------------------------------------------------------------------------------


def load(path: Path) -> str:
    """ "refused" as a model, "answered", or the code with which a request fails"""
    try:
        with Engine.load(path, threads=1, kv_memory="1MiB") as engine:
            prompt = "hi é" if engine.tokenizer.supported else {"tokens": [1, 2]}
            return "answered" if len(engine.generate(prompt, GREEDY).tokens) == 2 else "short"
    except RequestError as error:
        return error.code
    except ModelError as error:
        return "refused" if str(path) in str(error) else f"refused without its name: {error}"


@pytest.fixture
def copies(hostile_folders: list[Path], tmp_path: Path) -> list[Path]:
    """The sound folders, copied: byte-level tokenizer.json, tokenizer.model, and two weight files with an index."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in hostile_folders]


def test_the_folders_are_sound(copies: list[Path]) -> None:
    assert [load(folder) for folder in copies] == ["answered"] * 4


def boundaries(data: bytes) -> list[int]:
    """Sizes at which a file may be cut: its first bytes, its last ones, and around the end of a header."""
    header = 8 + struct.unpack_from("<Q", data)[0] if len(data) > 8 else 0
    near = [header + step for step in (-1, 0, 1, 4)] if header < len(data) else []
    sizes = {0, 1, 7, 8, 9, 16, len(data) // 3, len(data) // 2, *near, len(data) - 8, len(data) - 1}
    return sorted(size for size in sizes if 0 <= size < len(data))


def test_promise_a_model_file_is_data_truncated_files(copies: list[Path]) -> None:
    """Every file of every folder: without what was cut off none of them is whole."""
    for folder in copies:
        for path in sorted(folder.iterdir()):
            whole = path.read_bytes()
            for size in boundaries(whole):
                if not whole[size:].strip():
                    continue
                path.write_bytes(whole[:size])
                # What was cut off a tokenizer.model at the end of a field is fields left out.
                assert load(folder) == "refused" or path.name == "tokenizer.model", (path, size)
            path.write_bytes(whole)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff{}",
        b"9" * 100_000,
        b"[" * DEPTH,
        b'{"a":' * DEPTH,
        b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        b'{"added_tokens":' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    ],
)
def test_json_that_is_nothing_like_it(copies: list[Path], content: bytes) -> None:
    for folder in copies:
        for path in sorted(folder.glob("*.json")):
            whole = path.read_bytes()
            path.write_bytes(content)
            # Settings that say nothing are no mistake in files that may as well be missing.
            needed = path.name in ("config.json", "tokenizer.json", INDEX)
            assert load(folder) == ("refused" if content != b"{}" or needed else "answered"), path
            path.write_bytes(whole)


HUGE = [-1, 2**31, 2**32, 2**63, 2**64, 10**400, 1e300, float("nan"), "x", None, [], {}, True]


@pytest.mark.parametrize("value", HUGE, ids=repr)
def test_absurd_numbers_in_a_tokenizer(copies: list[Path], value: Any) -> None:
    """Ids, counts and scores; what loads must answer, and an id beyond the embedding is no way to a row of it."""
    path = copies[0] / "tokenizer.json"
    sound = json.loads(path.read_text())

    def with_change(change: Callable[[Any], None]) -> str:
        changed = json.loads(json.dumps(sound))
        change(changed)
        path.write_text(json.dumps(changed))
        return load(copies[0])

    assert with_change(lambda file: file["added_tokens"][0].update(id=value)) == "refused"
    assert with_change(lambda file: file["model"]["vocab"].update(hello=value)) == "refused"
    outcomes = {
        with_change(lambda file: file["post_processor"]["special_tokens"]["<s>"].update(ids=[value])),
        with_change(lambda file: file.update(truncation=value)),
        with_change(lambda file: file.update(padding=value)),
        with_change(lambda file: file["model"].update(dropout=value)),
        with_change(lambda file: file["model"].update(merges=value)),
        with_change(lambda file: file.update(normalizer={"type": "Prepend", "prepend": value})),
    }
    assert outcomes <= {"refused", "answered", "bad_field"}


@pytest.mark.parametrize("length", [1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_absurd_lengths_of_a_header_and_of_strings(copies: list[Path], length: int) -> None:
    weights = copies[0] / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", length) + weights.read_bytes()[8:])
    assert load(copies[0]) == "refused"
    pieces = copies[1] / "tokenizer.model"
    number = bytearray()
    while length > 0x7F:
        number.append(length & 0x7F | 0x80)
        length >>= 7
    pieces.write_bytes(b"\x0a" + bytes([*number, length]) + pieces.read_bytes())
    assert load(copies[1]) == "refused"


# --- a few lines that would make a text of terabytes ---------------------------------------------------------------

DOUBLE = {"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}
UNTAGGED = {"pattern": {"String": "h"}, "content": "hh"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
CHARACTER_MAP = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"x" * 100_000 + b"\0").decode()


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
        {"normalizer": {"normalizers": [UNTAGGED] * 60}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 6}] * 10}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "x" * 100_000}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "h" * 10_000}] * 50}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 60}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARACTER_MAP}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 60}},
    ],
)
def test_tokenizers_that_blow_up_a_text_are_refused(copies: list[Path], parts: dict[str, Any]) -> None:
    path = copies[0] / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    with pytest.raises(ModelError, match="makes each byte of a text up to"):
        load_tokenizer(copies[0])


def test_a_decoder_that_blows_up_tokens_leaves_token_ids(copies: list[Path]) -> None:
    path = copies[0] / "tokenizer.json"
    decoder = {"type": "Sequence", "decoders": [DOUBLE] * 60 + [{"type": "Fuse"}]}
    file = json.loads(path.read_text()) | {"decoder": decoder}
    file["model"]["unk_token"] = "he"
    path.write_text(json.dumps(file))
    assert "times longer" in load_tokenizer(copies[0]).kind
    assert load(copies[0]) == "answered"


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_long_affixes_are_refused(copies: list[Path], affix: str) -> None:
    path = copies[0] / "tokenizer.json"
    file = json.loads(path.read_text())
    file["model"] |= {affix: "x" * 1000, "merges": []}
    path.write_text(json.dumps(file))
    with pytest.raises(ModelError, match="prefix or suffix"):
        load_tokenizer(copies[0])


def test_a_text_is_refused_that_a_tokenizer_may_make_too_long(copies: list[Path]) -> None:
    path = copies[0] / "tokenizer.json"
    growing = {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 10}}
    path.write_text(json.dumps(json.loads(path.read_text()) | growing))
    tokenizer = load_tokenizer(copies[0])
    assert len(tokenizer.encode("h", add_special=False)) == 1024
    with pytest.raises(BadField, match="may make more than"):
        tokenizer.encode("x" * 50_000)
