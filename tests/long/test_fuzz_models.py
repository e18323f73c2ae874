"""Promise 6: a model file is data. Thousands of damaged models are refused by name, or load and answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from miro_cy._kernels import select

SCRIPT = Path(__file__).parent / "load_mutants.py"
MUTANTS = 9000
PROCESSES = 3
#: Crashes after which a process is not started again.
MAX_CRASHES = 5


class Loader:
    """Runs every PROCESSES-th seed in a process; after a crash another takes the rest."""

    def __init__(self, folder: Path, models: list[Path], index: int, end: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        isas = select.available()
        self._arguments = [str(folder), isas[index % len(isas)]]
        self._models = [str(model) for model in models]
        self._next, self._end = index, end
        self.process: subprocess.Popen[str] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self._next < self._end and len(self.problems) < MAX_CRASHES:
            self._read_one_process()

    def _read_one_process(self) -> None:
        before = self._next
        span = [str(self._next), str(self._end), str(PROCESSES)]
        command = [sys.executable, str(SCRIPT), *self._arguments, *span, *self._models]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as self.process:
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            for line in self.process.stdout:
                report = json.loads(line)
                self._next = report["seed"] + PROCESSES
                if "outcome" in report:
                    self.outcomes[report["outcome"]] += 1
                    if report["outcome"] == "broken":
                        self.problems.append(f"seed {report['seed']}: {report['detail']}")
            errors = self.process.stderr.read()
            code = self.process.wait()
        if code:
            at = "before a mutant" if self._next == before else f"seed {self._next - PROCESSES}"
            self.problems.append(f"{at}: exit status {code}\n{errors[-3000:]}")
            self._next = max(self._next, before + PROCESSES)


@pytest.fixture
def load_all(tmp_path: Path, patience: float) -> Callable[[list[Path], int], list[Loader]]:
    def run(models: list[Path], count: int) -> list[Loader]:
        loaders = [Loader(tmp_path, models, index, count) for index in range(PROCESSES)]
        try:
            for loader in loaders:
                loader.thread.join(patience / PROCESSES)
            assert not any(loader.thread.is_alive() for loader in loaders), "the mutants were not loaded in time"
        finally:
            for loader in loaders:
                if loader.process is not None:
                    loader.process.kill()
        return loaders

    return run


def test_promise_a_model_file_is_data_under_thousands_of_mutations(
    load_all: Callable[[list[Path], int], list[Loader]],
    golden_models: list[Path],
    text_model: Path,
    scaled: Callable[[int], int],
) -> None:
    count = scaled(MUTANTS)
    # The tokenizer of the last one is damaged with it, hence twice.
    loaders = load_all([*golden_models, text_model, text_model], count)
    problems = [problem for loader in loaders for problem in loader.problems]
    assert not problems, "\n".join(problems)
    outcomes = sum((loader.outcomes for loader in loaders), Counter())
    assert sum(outcomes.values()) == count
    kinds = Counter(outcome.split(":")[0] for outcome in outcomes.elements())
    assert kinds["refused"] > count / 4, outcomes
    assert kinds["answered"] > count / 10, outcomes
    assert kinds["failed"] > 0, outcomes
