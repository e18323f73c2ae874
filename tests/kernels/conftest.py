"""Every kernel test runs once for each instruction-set build that this machine can run.

In the sanitized build for the best one alone, and the one with tile registers: watching memory makes the others, which
have more to do, very slow.
"""

import numpy as np
import pytest

from miro_cy._kernels import select
from miro_cy.native import build_mode

ISAS = select.available()
if build_mode() == "sanitized":
    ISAS = ISAS[: 1 + (select.TILES in ISAS)]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request):
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
