from typing import Any

import numpy as np
from numpy.typing import NDArray

KV_TYPES: dict[str, tuple[int, type[np.generic]]]

class KVLayer:
    k: NDArray[Any]
    v: NDArray[Any]
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None
    def __init__(self, n_blocks: int, n_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> None: ...
    @property
    def nbytes(self) -> int: ...
