from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables

# Driven from Cython (the scheduler) only.
class PrefixSharing:
    @property
    def pool(self) -> BlockPool: ...
    @property
    def tables(self) -> BlockTables: ...
    def __init__(self, pool: BlockPool, tables: BlockTables) -> None: ...
