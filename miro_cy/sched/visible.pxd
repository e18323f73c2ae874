"""What can be seen of a scheduler's sequences."""

from miro_cy.sched.request cimport SequenceTable
from miro_cy.sched.sets cimport SequenceSets


cdef class VisibleSequences:
    cdef SequenceTable _table
    cdef SequenceSets _sets
