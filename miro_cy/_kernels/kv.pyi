from typing import Any

import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.memory import Arena

KV_TYPES: dict[str, tuple[int, type[np.generic]]]

class KVLayer:
    k: NDArray[Any]
    v: NDArray[Any]
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None
    def __init__(
        self,
        n_blocks: int,
        n_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        arena: Arena | None = None,
    ) -> None: ...
    @staticmethod
    def room(n_blocks: int, n_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> int: ...
    @property
    def nbytes(self) -> int: ...
