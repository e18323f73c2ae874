"""What setup.py compiles with: the tests here look at what its flags make of the kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """setup.py as a module; it builds only as a script."""
    spec = importlib.util.spec_from_file_location("miro_setup", ROOT / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
