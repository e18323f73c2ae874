import numpy as np
from numpy.typing import NDArray

FORMATS: dict[str, tuple[int, ...]]

class PackedWeights:
    kind: str
    def __init__(self, raw: NDArray[np.uint8], kind: str, n: int, k: int, threads: int = 1) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_float(self) -> bool: ...
