"""Damaged Hugging Face folders: one or two of a sound folder's files, edited where it hurts."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

from json_mutants import damaged, damaged_text

HEADER_LENGTHS = [0, 1, 2, 7, 8, 2**20, 2**27, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
#: How often a file is chosen, against 1 of any other.
WEIGHTS = {"model.safetensors": 3, "config.json": 3, "tokenizer.json": 3, "generation_config.json": 1}


class FolderModel:
    """A sound folder, in memory."""

    def __init__(self, source: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(source.iterdir())}

    def write(self, seed: int, folder: Path) -> Path:
        """Mutant number `seed` in a folder made anew; -1: the sound one."""
        path = folder / "mutant"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name, data in (self.files if seed < 0 else self.mutant(seed)).items():
            (path / name).write_bytes(data)
        return path

    def mutant(self, seed: int) -> dict[str, bytes]:
        draw = random.Random(seed)
        files = dict(self.files)
        names = sorted(files)
        for _ in range(draw.choice([1, 1, 1, 1, 2, 3])):
            name = draw.choices(names, [WEIGHTS.get(name, 2) for name in names])[0]
            files[name] = _edited(draw, name, files[name])
        return files


def _edited(draw: random.Random, name: str, data: bytes) -> bytes:
    if draw.random() < 0.03:
        return data[: draw.randrange(len(data) + 1)]
    if name.endswith(".safetensors"):
        return _safetensors(draw, data)
    if name.endswith(".json"):
        try:
            return damaged(draw, data)
        except (ValueError, RecursionError):  # a second mutation of what the first has made unreadable
            return damaged_text(draw, data)
    return _binary(draw, data)


def _safetensors(draw: random.Random, data: bytes) -> bytes:
    """The length of the header, its entries, or the data after it."""
    length = min(struct.unpack_from("<Q", data.ljust(8, b"\0"))[0], max(0, len(data) - 8))
    head, body = data[8 : 8 + length], data[8 + length :]
    kind = draw.random()
    if kind < 0.15:
        near = [length + step for step in (-8, -1, 1, 8)]
        wrong = draw.choice([draw.choice(HEADER_LENGTHS), draw.choice(near), len(data) - 8])
        return struct.pack("<Q", wrong % 2**64) + data[8:]
    if kind < 0.25:
        return data[:8] + head + draw.choice([body + b"\0", body[:-1], body[: draw.randrange(len(body) + 1)], b""])
    if kind < 0.35:  # numbers that no training gives, anywhere in the weights
        extreme = draw.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\1\0\0\0"])
        poisoned = bytearray(body)
        for _ in range(draw.choice([1, 10, 1000])):
            at = draw.randrange(max(1, len(body) // 4)) * 4
            poisoned[at : at + 4] = extreme
        return data[:8] + head + bytes(poisoned)[: len(body)]
    try:
        head = damaged(draw, head)
    except (ValueError, RecursionError):
        head = damaged_text(draw, head)
    head += b" " * (-len(head) % draw.choice([8, 8, 8, 1]))
    return struct.pack("<Q", len(head)) + head + body


def _binary(draw: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut out, put in, repeated."""
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(5):
            case 0 if at < len(out):
                out[at] = draw.randrange(256)
            case 1:
                del out[at : at + draw.randint(1, 20)]
            case 2:
                out[at:at] = draw.choice([b"\xff" * 9 + b"\x01", b"\0", b"\x80", draw.randbytes(8)])
            case 3:
                source = draw.randrange(len(out) + 1)
                out[at:at] = out[source : source + draw.randint(1, 100)]
            case _:
                out[at : at + 4] = draw.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\xff\x0f"])
    return bytes(out)
