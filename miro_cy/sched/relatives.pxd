"""A scheduler's part between two steps: who joins a family, and who goes on when it has waited for it."""

from miro_cy.batch cimport BatchView
from miro_cy.sched.room cimport KVRoom
from miro_cy.sched.visible cimport VisibleSequences


cdef class RelatedSequences(VisibleSequences):
    cdef readonly BatchView view        # the view plan() fills, its sizes are the largest a step can have
    cdef object _clock
    cdef object _policy
    cdef object _families
    cdef KVRoom _room
    cdef bint _is_planned               # between plan() and commit()

    cdef int _check_committed(self) except -1
