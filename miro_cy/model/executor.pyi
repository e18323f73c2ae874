import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.kv import KVLayer
from miro_cy.batch import BatchView
from miro_cy.config import Compute
from miro_cy.model.kv_groups import KVGroups
from miro_cy.model.spec import ModelSpec
from miro_cy.model.weights import Weights

PARTS: tuple[str, ...]

class CpuExecutor:
    spec: ModelSpec
    weights: Weights
    threads: int
    fast: bool
    compute: Compute
    isa: str
    groups: KVGroups
    kv_layers: list[KVLayer]
    kv_bytes: int
    buffer_bytes: int
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        n_blocks: int,
        block_size: int,
        kv_dtype: str,
        fast: bool,
        threads: int,
        max_tokens: int,
        context: int,
        touch: bool = False,
        tiles: bool = False,
    ) -> None: ...
    def forward(self, view: BatchView) -> NDArray[np.float32]: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> dict[str, float]: ...
    def close(self) -> None: ...
