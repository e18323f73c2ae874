"""Reference files, small checkpoints to take apart, and the executor without a scheduler."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy._kernels import select
from miro_cy.batch import BatchView
from miro_cy.config import Compute
from miro_cy.formats.ggml_types import GGMLType
from miro_cy.formats.safetensors import INDEX, SafetensorsFolder
from miro_cy.model.executor import CpuExecutor
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.spec import ModelSpec
from miro_cy.model.weights import Weights, load_weights

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "data" / "golden"
build_gguf = runpy.run_path(str(TESTS / "gguf_bytes.py"))["build_gguf"]
build_safetensors = runpy.run_path(str(TESTS / "safetensors_bytes.py"))["build_safetensors"]

F32 = NDArray[np.float32]
#: slot, position of the first token, tokens, how many of the last ones' logits are wanted
Row = tuple[int, int, NDArray[np.int32], int]


@pytest.fixture(params=select.available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction-set build this machine can run, in use while the test runs."""
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


@pytest.fixture
def mode_of_isa(isa: str) -> Compute:
    """The compute mode in which a build multiplies quantised weights by rounded activations."""
    return "bf16" if isa == select.TILES else "fast"


@pytest.fixture(scope="session")
def golden_file(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A reference file by its path below the reference data; a few are in the repository, the others may be skipped."""

    def find(name: str) -> Path:
        kept: Path = GOLDEN / name
        return kept if kept.exists() else request.getfixturevalue("reference_data") / name

    return find


# --- checkpoints to take apart -----------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """A small llama checkpoint. tensors: row-major shape and type; float32 ones are random, others all zero bits."""

    folder: Path
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 96
    vocab: int = 40
    metadata: dict[str, Any] = field(init=False)
    tensors: dict[str, tuple[tuple[int, ...], GGMLType]] = field(init=False)

    def __post_init__(self) -> None:
        hidden, ffn, kv = self.hidden, self.ffn, self.hidden // self.heads * self.kv_heads
        self.metadata = {
            "general.architecture": "llama",
            "llama.block_count": 1,
            "llama.context_length": 256,
            "llama.embedding_length": hidden,
            "llama.feed_forward_length": ffn,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": hidden // self.heads,
        }
        shapes = {
            "token_embd.weight": (self.vocab, hidden),
            "output.weight": (self.vocab, hidden),
            "output_norm.weight": (hidden,),
            "blk.0.attn_norm.weight": (hidden,),
            "blk.0.attn_q.weight": (hidden, hidden),
            "blk.0.attn_k.weight": (kv, hidden),
            "blk.0.attn_v.weight": (kv, hidden),
            "blk.0.attn_output.weight": (hidden, hidden),
            "blk.0.ffn_norm.weight": (hidden,),
            "blk.0.ffn_gate.weight": (ffn, hidden),
            "blk.0.ffn_up.weight": (ffn, hidden),
            "blk.0.ffn_down.weight": (hidden, ffn),
        }
        self.tensors = {name: (shape, GGMLType.F32) for name, shape in shapes.items()}

    def write(self) -> Path:
        """The checkpoint as a GGUF file in `folder`."""
        rng = np.random.default_rng(3)
        entries, data = [], bytearray()
        for name, (shape, kind) in self.tensors.items():
            entries.append((name, shape[::-1], int(kind), len(data)))
            n = int(np.prod(shape))
            if kind == GGMLType.F32:
                data += rng.normal(0, 0.1, n).astype(np.float32).tobytes()
            else:
                data += bytes(n // kind.block * kind.block_bytes)
            data += bytes(-len(data) % 32)
        path = self.folder / "small.gguf"
        path.write_bytes(build_gguf(self.metadata, entries, bytes(data)))
        return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


@pytest.fixture
def larger_checkpoint(tmp_path: Path) -> Checkpoint:
    """One whose matrices span many memory pages (17 MiB in all)."""
    return Checkpoint(tmp_path, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=2048)


class Folder:
    """A copy of a reference folder to take apart: `config`, and `tensors` as name -> (dtype, shape, bytes)."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        self.config = json.loads((source / "config.json").read_text())
        self.generation: Any = json.loads((source / "generation_config.json").read_text())
        stored = SafetensorsFolder(source)
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {
            name: (info.kind, info.shape, stored.data(name).tobytes()) for name, info in stored.tensors.items()
        }
        stored.close()

    def write(self, shards: int = 1) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        (self.path / "config.json").write_text(json.dumps(self.config))
        if self.generation is not None:
            (self.path / "generation_config.json").write_text(json.dumps(self.generation))
        if shards == 1:
            (self.path / "model.safetensors").write_bytes(build_safetensors(self.tensors))
            return self.path
        names = sorted(self.tensors)
        places = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {name: self.tensors[name] for name in names[i::shards]}
            (self.path / file).write_bytes(build_safetensors(part))
            places |= dict.fromkeys(part, file)
        (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return self.path

    def convert(self, dtype: str, change: Callable[[F32], NDArray[Any]]) -> None:
        """Every tensor through `change`, which gives the new element type's bits."""
        for name, (_, shape, raw) in self.tensors.items():
            self.tensors[name] = (dtype, shape, change(np.frombuffer(raw, np.float32)).tobytes())


@pytest.fixture
def open_folder(golden_file: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Folder]:
    """A copy of the reference folder hf/<name>."""
    return lambda name: Folder(golden_file(f"hf/{name}/model.safetensors").parent, tmp_path / "model")


@pytest.fixture
def folder(open_folder: Callable[[str], Folder]) -> Folder:
    return open_folder("llama")


# --- the executor alone ------------------------------------------------------------------------------------------


class Runner:
    """An executor over a KV pool whose blocks are handed out in a scattered order; rows of tokens in, logits out."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        fast: bool,
        kv_dtype: str,
        threads: int = 1,
        block_size: int = 32,
        slots: int = 8,
        context: int = 128,
    ) -> None:
        width = -(-context // block_size)
        order = np.random.default_rng(block_size).permutation(slots * width).astype(np.int32)
        self._tables = np.ascontiguousarray(order.reshape(1, slots, width))
        self._view = BatchView(slots, slots * context, self._tables)
        self._executor = CpuExecutor(
            spec,
            weights,
            n_blocks=slots * width,
            block_size=block_size,
            kv_dtype=kv_dtype,
            fast=fast,
            threads=threads,
            max_tokens=slots * context,
            context=context,
        )

    def step(self, rows: Sequence[Row]) -> list[F32]:
        """One forward pass; the logits of each row."""
        self._view.clear()
        for slot, first, tokens, n_log in rows:
            self._view.add_row(slot, first, tokens, n_log)
        logits = self._executor.forward(self._view).copy()
        ends = np.cumsum([n_log for *_, n_log in rows])
        return np.split(logits, ends[:-1])

    def score(self, tokens: NDArray[np.int32], chunk: int, slot: int = 0) -> F32:
        """Logits after every token, the tokens given `chunk` at a time."""
        parts = []
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            parts += self.step([(slot, first, part, len(part))])
        return np.concatenate(parts)


@pytest.fixture
def load_runner(golden_file: Callable[[str], Path]) -> Callable[..., Callable[..., Runner]]:
    """load_runner(file) loads its weights for the build in use and gives what makes a Runner of them."""

    def load(name: str) -> Callable[..., Runner]:
        with open_checkpoint(golden_file(name)) as stored:
            spec = stored.spec
            weights = load_weights(stored)
        return lambda **settings: Runner(spec, weights, **settings)

    return load
