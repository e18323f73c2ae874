"""Threads that meet, and that deal work out among themselves: declarations of include/team.h."""


cdef extern from "team.h" nogil:
    enum:
        MI_TAKEN_BITS
    ctypedef struct mi_barrier:
        pass
    ctypedef struct mi_turn:
        pass
    ctypedef struct mi_team:
        mi_barrier barrier
        mi_turn* turns
    ctypedef struct mi_member:
        int th
        int nth
    int mi_thread_id()
    int mi_team_size()
    void mi_barrier_wait(mi_barrier* b, int n)
    mi_member mi_join(mi_team* team)
    mi_member mi_alone()
    void mi_meet(mi_member* me)
    void mi_leave(mi_member* me)
    void mi_deal(mi_member* me, Py_ssize_t n)
    Py_ssize_t mi_take(mi_member* me, Py_ssize_t most, Py_ssize_t* first)


cdef class Team:
    """What up to `threads` threads meet at and deal work out with, for the parallel regions of one caller."""
    cdef object turns
    cdef mi_team shared
