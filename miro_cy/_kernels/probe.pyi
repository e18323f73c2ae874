import numpy as np
from numpy.typing import NDArray

READ_UNIT: int
MAX_DOT_ROUNDS: int

def fill(buffer: NDArray[np.uint8], value: int, threads: int = 1) -> None: ...
def read(buffer: NDArray[np.uint8], threads: int = 1) -> tuple[int, float]: ...
def fma(
    x: NDArray[np.float32], a: float, b: float, rounds: int, pieces: int = 1, threads: int = 1
) -> tuple[NDArray[np.float32], float]: ...
def dot(
    w: NDArray[np.uint8], x: NDArray[np.int8], rounds: int, pieces: int = 1, threads: int = 1
) -> tuple[NDArray[np.int32], float]: ...
def tile(
    x: NDArray[np.uint8], w: NDArray[np.uint8], rounds: int, pieces: int = 1, threads: int = 1
) -> tuple[NDArray[np.float32], float]: ...
