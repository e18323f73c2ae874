"""Every kernel test runs once for each instruction-set build that this machine can run."""

import numpy as np
import pytest

from miro_cy._kernels import select


@pytest.fixture(params=select.available(), autouse=True)
def isa(request):
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
