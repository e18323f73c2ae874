"""What setup.py compiles with: the tests here look at what its flags make of the kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ASK = """
import json, setup
levels = {name: flags for name, flags in setup.LEVELS.items() if setup.accepts(flags)}
print(json.dumps([setup.compiler(), setup.FLAGS, levels, setup.ARM_LEVELS]))
"""


class Build(NamedTuple):
    """setup.py's compiler, flags for all, and flags of each instruction-set level that this compiler takes."""

    compiler: str
    flags: list[str]
    levels: dict[str, list[str]]
    arm_levels: dict[str, list[str]]


@pytest.fixture(scope="session")
def build() -> Build:
    """Asked in a process of its own: setuptools cannot be imported once anything has imported distutils."""
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Build(*json.loads(done.stdout))
