import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.memory import Arena

FORMATS: dict[str, tuple[int, ...]]

def packed_nbytes(kind: str, n: int, k: int) -> int: ...
def buffer_nbytes(kind: str, n: int, k: int) -> int: ...

class PackedWeights:
    kind: str
    def __init__(
        self, raw: NDArray[np.uint8], kind: str, n: int, k: int, threads: int = 1, arena: Arena | None = None
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_float(self) -> bool: ...
