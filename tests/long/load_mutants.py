"""Loads damaged models one after another: load_mutants.py FOLDER ISA FIRST END STEP MODEL...

Prints a JSON line before and after each: {"seed"} and {"seed", "outcome", "detail"}. A mutant that takes too long or
crashes ends the process. Run it by hand with the seed of a failure and that seed + 1.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import time
from pathlib import Path

from mutants import Layout, mutant

from miro_cy import Engine, SamplingParams
from miro_cy._kernels import select
from miro_cy.errors import ModelError, ModelNotFound, RequestError

#: For one mutant: far more than any takes, even on a busy machine.
SECONDS = 30
#: Address space beyond what the process has before the first mutant; the largest file takes 3 MB.
MEMORY = 256 * 2**20
SETTINGS = {"threads": 1, "kv_memory": "1MiB", "max_num_seqs": 4}
TEXT = "hello world, été 😀"
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)


def answer(engine: Engine) -> list[int]:
    """Two tokens after a chat where the model has a template, else after a text or token ids."""
    prompt: dict[str, object] = {"tokens": [1, 0, min(2, engine.vocab_size - 1)]}
    if engine.tokenizer.has_template:
        prompt = {"messages": [{"role": "user", "content": TEXT}]}
    result = engine.generate(TEXT if engine.tokenizer.supported and "tokens" in prompt else prompt, GREEDY)
    assert isinstance(result.text, str)
    assert result.finish_reason == "length"
    assert len(result.tokens) == 2
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
    except ModelNotFound:
        raise  # the file is there: something else went wrong
    except ModelError as error:
        return f"refused: {type(error).__name__}"


def main() -> None:
    folder, isa, first, end, step, *models = sys.argv[1:]
    files = [Layout(Path(model).read_bytes()) for model in models]
    path = Path(folder) / f"mutant-{first}.gguf"
    select.use(isa)
    path.write_bytes(files[0].data)
    assert outcome(path) == "answered"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for seed in range(int(first), int(end), int(step)):
        path.write_bytes(mutant(files, seed))
        print(json.dumps({"seed": seed}), flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began = time.monotonic()
        try:
            result, detail = outcome(path), ""
        except Exception as error:  # whatever is not an error of a model or a request is a finding
            result, detail = "broken", f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - began
        print(json.dumps({"seed": seed, "outcome": result, "detail": detail, "seconds": seconds}), flush=True)
    path.unlink()


if __name__ == "__main__":
    faulthandler.enable()
    main()
