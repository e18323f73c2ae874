from miro_cy.sched.sets import SequenceSets

# Driven from Cython (the scheduler) only.
class KVRoom:
    def __init__(self, sets: SequenceSets, watermark: int) -> None: ...
