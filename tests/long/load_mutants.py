"""Loads damaged models one after another: load_mutants.py FOLDER ISA FIRST END STEP MODEL...

Models are GGUF files and Hugging Face folders. Prints a JSON line before and after each mutant: {"seed"} and {"seed",
"outcome", "detail", "seconds"}. One that takes too long or crashes ends the process. Run it by hand with the seed of a
failure and that seed + 1; the mutant itself is left in FOLDER.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from folder_mutants import FolderModel
from mutants import Layout, mutant

from miro_cy import Engine, SamplingParams
from miro_cy._kernels import select
from miro_cy.errors import ConfigError, ModelError, ModelNotFound, RequestError
from miro_cy.native import build_mode

#: For one mutant: far more than any takes, even on a busy machine.
SECONDS = 60 if build_mode() == "sanitized" else 10
#: Memory beyond what the process has before the first mutant; the largest file takes 3 MB.
MEMORY = 256 * 2**20
SETTINGS = {"threads": 1, "kv_memory": "1MiB", "max_num_seqs": 4}
TEXT = "hello world, été 😀"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


def answer(engine: Engine) -> list[int]:
    """Four tokens after a chat where the model has a template, else after a text or token ids."""
    prompt: dict[str, object] = {"tokens": [1, 0, min(2, engine.vocab_size - 1)]}
    if engine.tokenizer.has_template:
        prompt = {"messages": [{"role": "user", "content": TEXT}]}
    result = engine.generate(TEXT if engine.tokenizer.supported and "tokens" in prompt else prompt, GREEDY)
    assert isinstance(result.text, str)
    assert result.finish_reason == "length"
    assert len(result.tokens) == 4
    assert all(0 <= token < engine.vocab_size for token in result.tokens)
    assert result.logprobs is not None
    assert all(item.logprob <= 0 for item in result.logprobs)
    return result.tokens


def outcome(path: Path) -> str:
    """ "refused" as a model, "failed" as a request, or "answered" """
    try:
        with Engine.load(path, **SETTINGS) as engine:
            try:
                first = answer(engine)
            except RequestError as error:
                engine.check_integrity()
                return f"failed: {error.code}"
            assert answer(engine) == first
            engine.check_integrity()
            return "answered"
    except (ModelError, ConfigError) as error:
        # A file is there (an index may name another), and no mutant needs much memory: something else went wrong.
        if "not enough memory" in str(error) or (isinstance(error, ModelNotFound) and path.is_file()):
            raise
        return f"refused: {type(error).__name__}"


class Models:
    """The sound models; files and folders take turns in the seeds."""

    def __init__(self, paths: list[Path], folder: Path, name: str) -> None:
        self.files = [Layout(path.read_bytes()) for path in paths if path.is_file()]
        self.folders = [FolderModel(path) for path in paths if path.is_dir()]
        self._place = folder / name
        self._place.mkdir()

    def sound(self) -> list[Path]:
        """One of each kind, undamaged."""
        return [*(self._file(file.data) for file in self.files[:1]), *(f.write(-1, self._place) for f in self.folders)]

    def mutant(self, seed: int) -> Path:
        turn = seed // 2 if self.files and self.folders else seed
        if self.files and (seed % 2 == 0 or not self.folders):
            return self._file(mutant(self.files, turn))
        return self.folders[turn % len(self.folders)].write(seed, self._place)

    def _file(self, data: bytes) -> Path:
        path = self._place / "mutant.gguf"
        path.write_bytes(data)
        return path


def limit_memory() -> None:
    """From here on; what watches memory reserves more of the address space than any limit would leave."""
    if build_mode() != "sanitized":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def main() -> None:
    folder, isa, first, end, step, *paths = sys.argv[1:]
    models = Models([Path(path) for path in paths], Path(folder), f"from-{first}")
    select.use(isa)
    for path in models.sound():  # libraries are imported now, and buffers have their sizes
        assert outcome(path) == "answered", path
    limit_memory()
    for seed in range(int(first), int(end), int(step)):
        print(json.dumps({"seed": seed}), flush=True)
        path = models.mutant(seed)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began = time.monotonic()
        try:
            result, detail = outcome(path), ""
        except Exception as error:  # whatever is not an error of a model or a request is a finding
            result, detail = "broken", f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - began
        print(json.dumps({"seed": seed, "outcome": result, "detail": detail, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    main()
