"""Fixtures every folder shares: the real model and the larger reference data, neither of which is in the repository.

A test that asks for the model is marked `model` by that alone. Time limits: 120 s a test (pyproject.toml), 300 s for
one with the model; a test's own `timeout` mark wins. Hypothesis draws the same examples each time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings

from miro_cy._kernels import select
from miro_cy.native import build_mode

MODEL_TIMEOUT_S = 300

# Shells start background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would wait in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("miro", derandomize=True, deadline=None, database=None)
settings.load_profile("miro")


def pytest_configure() -> None:
    wanted = os.environ.get("MIRO_TEST_BUILD", build_mode())
    if wanted != build_mode():
        pytest.exit(f"the {build_mode()} build is imported, not the {wanted} one", returncode=3)


def pytest_report_header() -> str:
    return f"miro: {build_mode()} build"


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
        if item.get_closest_marker("model") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(MODEL_TIMEOUT_S))


@pytest.fixture(params=["fast", "bf16"])
def quantised_mode(request: pytest.FixtureRequest) -> str:
    """Each compute mode in which activations are rounded for quantised weights; skips what the machine lacks."""
    if request.param == "bf16" and not select.has_tiles():
        pytest.skip("no tile registers (Intel AMX) here for compute bf16")
    mode: str = request.param
    return mode


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF (Q4_1), from the cache or an installed package; fetches nothing itself."""
    from miro_cy.errors import ModelNotFound
    from miro_cy.hub import resolve

    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have the model: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of larger reference files (MIRO_REFERENCE_DATA); skips, saying so, where it is unset."""
    folder = os.environ.get("MIRO_REFERENCE_DATA")
    if not folder:
        pytest.skip("MIRO_REFERENCE_DATA is not set: the larger reference files are not in the repository")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"MIRO_REFERENCE_DATA={folder} is not a folder", pytrace=False)
    return path
