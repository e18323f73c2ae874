from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def deal(
    sizes: Sequence[int], threads: int, most: int, late: int | None = None, rounds: int = 1
) -> tuple[NDArray[np.int32], NDArray[np.intp]]: ...
