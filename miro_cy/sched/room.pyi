from miro_cy.sched.request import SequenceTable

# Driven from Cython (the scheduler) only.
class KVRoom:
    def __init__(self, table: SequenceTable, watermark: int) -> None: ...
