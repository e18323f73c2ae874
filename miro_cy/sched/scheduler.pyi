from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.sched.config import SchedulerConfig as SchedulerConfig
from miro_cy.sched.limits import Limits
from miro_cy.sched.relatives import RelatedSequences

__all__ = ["Scheduler", "SchedulerConfig"]

class Scheduler(RelatedSequences):
    @property
    def limits(self) -> Limits: ...
    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def max_logits(self) -> int: ...
    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        config: SchedulerConfig,
        *,
        max_context: int,
        clock: Callable[[], float],
    ) -> None: ...
    def has_room(self, choices: int = 1) -> bool: ...
    def check(self, n_prompt: int, max_new: int) -> None: ...
    def add(
        self,
        tokens: NDArray[np.int32],
        max_new: int,
        *,
        choices: int = 1,
        logits_from: int = -1,
        extras: Iterable[tuple[bytes, bytes]] = (),
        priority: int = 0,
        client: str = "",
    ) -> int: ...
    def plan(self) -> BatchView | None: ...
    def planned(self) -> list[int]: ...
    def commit(self, sampled: NDArray[np.int32], seconds: float) -> None: ...
    def finish(self, seq: int) -> None: ...
