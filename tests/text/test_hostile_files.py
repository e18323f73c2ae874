"""Promise 6 for tokenizers: whatever their files hold, loading ends soon in a tokenizer or a typed error."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miro_cy.errors import BadField, ModelFormatError, Unsupported
from miro_cy.text import Tokenizer, load_tokenizer

MUTATIONS = 300
MAX_BYTES = 64 * 2**20
_JUNK = [b"99999999999", b"-1", b"null", b"[]", b"{}", b"1e309", b'"', b"\\ud800", b"\xff\xff\xff\xff\x0f", b"\0"]
_TEXTS = ("hello wo 12345  <s> hi<tool>  b é 世 \0 ab hi", "", " ", "<|user|>\nhi")


def mutations(data: bytes, seed: int) -> Iterator[bytes]:
    """Seeded mutations: bytes changed, cut out, put in, repeated."""
    rnd = random.Random(seed)
    for _ in range(MUTATIONS):
        out = bytearray(data)
        for _ in range(rnd.choice([1, 1, 1, 2, 8])):
            at = rnd.randrange(len(out) + 1)
            match rnd.randrange(5):
                case 0 if at < len(out):
                    out[at] = rnd.randrange(256)
                case 1:
                    del out[at : at + rnd.randint(1, 20)]
                case 2:
                    out[at:at] = rnd.randbytes(rnd.randint(1, 8))
                case 3:
                    source = rnd.randrange(len(out) + 1)
                    out[at:at] = out[source : source + rnd.randint(1, 100)]
                case _:
                    out[at:at] = rnd.choice(_JUNK)
        yield bytes(out)


def use(tokenizer: Tokenizer) -> None:
    """All that a request would do with it."""
    for text in _TEXTS:
        for parse_special in (True, False):
            try:
                ids = tokenizer.encode(text, parse_special=parse_special)
            except (BadField, Unsupported):
                continue
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            stream = tokenizer.stream()
            assert "".join(stream.push(i)[0] for i in ids) + stream.finish() == tokenizer.decode(ids)
    if tokenizer.has_template:
        with contextlib.suppress(BadField, Unsupported):
            tokenizer.render([{"role": "user", "content": "hi"}])


def load_all(folder: Path, name: str, data: bytes, seed: int) -> tuple[int, int]:
    """How many mutations loaded, and how many were refused; memory stays within MAX_BYTES for each."""
    loaded = refused = 0
    load_tokenizer(folder)  # libraries are imported now
    for i, mutation in enumerate(mutations(data, seed)):
        (folder / name).write_bytes(mutation)
        if i % 4 == 0:  # watching memory takes its time
            tracemalloc.start()
        try:
            use(load_tokenizer(folder))
            loaded += 1
        except ModelFormatError:
            refused += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_BYTES
    return loaded, refused


CONFIG: dict[str, Any] = {
    "add_bos_token": True,
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "chat_template": [{"name": "default", "template": "{% for m in messages %}{{ m.content }}{% endfor %}"}],
    "added_tokens_decoder": {"271": {"content": "<new>", "special": True, "lstrip": True, "rstrip": False}},
    "legacy": False,
}


@pytest.mark.timeout(300)
def test_promise_a_model_file_is_data_tokenizer_json(
    make_folder: Callable[..., Path], tokenizer_json: Callable[..., Any]
) -> None:
    whole = tokenizer_json()
    folder = make_folder({"tokenizer.json": whole})
    # The parts other than the vocabulary on their own, as most of the file's bytes are the vocabulary.
    data = json.dumps(whole).encode()
    start = data.index(b'"vocab"')
    loaded, refused = load_all(folder, "tokenizer.json", data, 1)
    assert loaded > 10
    assert refused > 100
    for head in mutations(data[:start], 2):
        (folder / "tokenizer.json").write_bytes(head + data[start:])
        try:
            use(load_tokenizer(folder))
        except ModelFormatError:
            continue


@pytest.mark.timeout(300)
def test_promise_a_model_file_is_data_tokenizer_model(
    make_folder: Callable[..., Path], model_bytes: Callable[..., bytes]
) -> None:
    data = model_bytes()
    loaded, refused = load_all(make_folder({"tokenizer.model": data}), "tokenizer.model", data, 3)
    assert loaded > 10
    assert refused > 100


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", CONFIG),
        ("special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}),
        ("added_tokens.json", {"<new>": 271, "<|im_end|>": 272}),
        ("config.json", {"bos_token_id": 1, "eos_token_id": [2, 3], "text_config": {"eos_token_id": 5}}),
        ("generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 3]}),
    ],
)
def test_promise_a_model_file_is_data_settings(
    make_folder: Callable[..., Path], model_bytes: Callable[..., bytes], name: str, content: Any
) -> None:
    folder = make_folder({"tokenizer.model": model_bytes(), name: content})
    loaded, refused = load_all(folder, name, json.dumps(content).encode(), 4)
    assert loaded > 10
    assert refused > 10


def test_files_of_any_size_are_refused_unread(make_folder: Callable[..., Path]) -> None:
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        folder = make_folder({})
        with open(folder / name, "wb") as file:
            file.truncate(2**34)
        with pytest.raises(ModelFormatError, match=r"has 17179869184 bytes; the limit is \d+"):
            load_tokenizer(folder)


@pytest.mark.timeout(60)
def test_a_named_pipe_is_not_waited_for(make_folder: Callable[..., Path]) -> None:
    folder = make_folder({})
    os.mkfifo(folder / "tokenizer_config.json")
    with pytest.raises(ModelFormatError, match="is not a file"):
        load_tokenizer(folder)


MAPS = {"a size of 4 GiB": b"\xff\xff\xff\xff", "a size over the end": b"\x08\0\0\0\0\0\0\0", "no size": b"\0\0",
        "half an entry": b"\x02\0\0\0\0\0\0\0"}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", MAPS)
def test_promise_a_model_file_is_data_character_maps(
    make_folder: Callable[..., Path], tokenizer_json: Callable[..., Any], name: str
) -> None:
    """Refused before the library makes room for the index, of a size that the file chooses."""
    table = base64.b64encode(MAPS[name]).decode()
    step = {"type": "Precompiled", "precompiled_charsmap": table}
    for normalizer in (step, {"type": "Sequence", "normalizers": [step]}):
        with pytest.raises(ModelFormatError, match="its character map"):
            load_tokenizer(make_folder({"tokenizer.json": tokenizer_json(normalizer=normalizer)}))


def test_promise_a_model_file_is_data_steps_with_keys_of_others(
    make_folder: Callable[..., Path], tokenizer_json: Callable[..., Any]
) -> None:
    """Which of its keys a step goes by is the library's choice."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, "content": ""}
    part = {"type": "Sequence", "pretokenizers": [level] * 30}
    with pytest.raises(ModelFormatError, match="makes each byte of a text up to"):
        load_tokenizer(make_folder({"tokenizer.json": tokenizer_json(pre_tokenizer=part)}))
    table = base64.b64encode(MAPS["a size of 4 GiB"]).decode()
    step = {"type": "Precompiled", "precompiled_charsmap": table, "pattern": {"String": "a"}, "content": "a"}
    with pytest.raises(ModelFormatError, match="its character map"):
        load_tokenizer(make_folder({"tokenizer.json": tokenizer_json(normalizer=step)}))
