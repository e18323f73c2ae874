"""Processes that load damaged models, and the sound models to damage."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy._kernels import select
from miro_cy.formats.safetensors import INDEX, SafetensorsFolder

HERE = Path(__file__).parent
TESTS = HERE.parent
GOLDEN = TESTS / "data" / "golden"
_TEXT = runpy.run_path(str(TESTS / "text" / "conftest.py"))
_BUILD = runpy.run_path(str(TESTS / "safetensors_bytes.py"))["build_safetensors"]
PROCESSES = 3
#: Crashes after which a process is not started again.
MAX_CRASHES = 5
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# Fixtures for whoever imports this module: the bytes of a tokenizer.model, and a byte-level tokenizer.json.
model_bytes = _TEXT["model_bytes"]
tokenizer_json = _TEXT["tokenizer_json"]


def unigram_json() -> dict[str, Any]:
    """A `tokenizer.json` in the way of SentencePiece."""
    pieces = ["▁", "h", "e", "l", "o", "▁he", "llo", "▁w", "wor", "ld"]
    vocab = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], *([f"<0x{byte:02X}>", 0.0] for byte in range(256))]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "added_tokens": [{"id": i, "content": text} | special for i, text in enumerate(("<unk>", "<s>", "</s>"))],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": True,
            "vocab": [*vocab, *([piece, -1.0 - i] for i, piece in enumerate(pieces))],
        },
    }


def make_folders(folder: Path, byte_level: dict[str, Any], sentencepiece: bytes) -> list[Path]:
    """Four Hugging Face folders: byte-level BPE, SentencePiece, Unigram with the weights in two files, and a qwen3."""
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    added = {"271": {"content": "<new>", "special": True, "lstrip": True, "rstrip": False, "normalized": False}}
    texts: dict[str, dict[str, Any]] = {
        "llama": {"tokenizer.json": byte_level, "tokenizer_config.json": settings},
        "llama-tied-bias": {
            "tokenizer.model": sentencepiece,
            "tokenizer_config.json": settings | {"added_tokens_decoder": added, "legacy": False},
            "special_tokens_map.json": {"unk_token": "<unk>", "eos_token": {"content": "</s>"}},
        },
        "llama3-rope": {
            "tokenizer.json": unigram_json(),
            "tokenizer_config.json": settings | {"chat_template": [{"name": "default", "template": TEMPLATE}]},
            "added_tokens.json": {"<new>": 269},
        },
        "qwen3": {"tokenizer.json": byte_level, "tokenizer_config.json": settings},
    }
    made = []
    for name, files in texts.items():
        path = folder / name
        path.mkdir(parents=True)
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(GOLDEN / "hf" / name / file, path)
        for file, content in files.items():
            (path / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        made.append(path)
    _split(folder / "llama3-rope")
    return made


def _split(path: Path) -> None:
    """The weights in two files and an index."""
    whole = SafetensorsFolder(path)
    names = sorted(whole.tensors)
    places: dict[str, str] = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        stored = {name: whole.tensors[name] for name in names[i::2]}
        part = {name: (tensor.kind, tensor.shape, whole.data(name).tobytes()) for name, tensor in stored.items()}
        (path / file).write_bytes(_BUILD(part))
        places |= dict.fromkeys(part, file)
    whole.close()
    (path / "model.safetensors").unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


class Loader:
    """Runs every `step`-th seed in a process; after a crash another takes the rest."""

    def __init__(self, folder: Path, models: list[Path], index: int, end: int, step: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = (0.0, -1)  # seconds, seed
        isas = select.available()
        self._folder, self._isa = folder, isas[index % len(isas)]
        self._models = [str(model) for model in models]
        self._next, self._end, self._step = index, end, step
        self.process: subprocess.Popen[str] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self._next < self._end and len(self.problems) < MAX_CRASHES:
            self._read_one_process()

    def _read_one_process(self) -> None:
        before = self._next
        span = [str(self._next), str(self._end), str(self._step)]
        command = [sys.executable, str(HERE / "load_mutants.py"), str(self._folder), self._isa, *span, *self._models]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as self.process:
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            for line in self.process.stdout:
                report = json.loads(line)
                self._next = report["seed"] + self._step
                if "outcome" in report:
                    self.outcomes[report["outcome"]] += 1
                    self.slowest = max(self.slowest, (report["seconds"], report["seed"]))
                    if report["outcome"] == "broken":
                        self.problems.append(f"seed {report['seed']}: {report['detail']}")
            errors = self.process.stderr.read()
            code = self.process.wait()
        if code:
            at = "before a mutant" if self._next == before else f"seed {self._next - self._step}"
            self.problems.append(f"{at}: exit status {code}\n{errors[-3000:]}")
            self._next = max(self._next, before + self._step)


def load_mutants(
    folder: Path, models: list[Path], count: int, seconds: float, processes: int = PROCESSES
) -> Counter[str]:
    """Load mutants 0 .. count - 1. What came of them, and how often; fails when one of them came to no good end.

    Prints how long the slowest took.
    """
    loaders = [Loader(folder, models, index, count, processes) for index in range(processes)]
    deadline = time.monotonic() + seconds
    try:
        for loader in loaders:
            loader.thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(loader.thread.is_alive() for loader in loaders), "the mutants were not loaded in time"
    finally:
        for loader in loaders:
            if loader.process is not None:
                loader.process.kill()
    problems = [problem for loader in loaders for problem in loader.problems]
    assert not problems, "\n".join(problems)
    slowest, seed = max(loader.slowest for loader in loaders)
    outcomes = sum((loader.outcomes for loader in loaders), Counter())
    print(f"{count} mutants: {dict(outcomes)}; the slowest, seed {seed}, took {slowest:.2f} s")
    assert sum(outcomes.values()) == count
    return Counter(outcome.split(":")[0] for outcome in outcomes.elements())


@pytest.fixture(scope="session")
def hostile_folders(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_json: Callable[..., dict[str, Any]],
    model_bytes: Callable[..., bytes],
) -> list[Path]:
    """The sound Hugging Face folders that mutants are made of."""
    return make_folders(tmp_path_factory.mktemp("folders"), tokenizer_json(), model_bytes())
