"""SequenceSets, see sets.pxd."""

from libc.stdlib cimport free, malloc
from libc.string cimport memmove

from miro_cy.errors import InternalError

from miro_cy.native cimport MIRO_INDEX
from miro_cy.sched.forks cimport blocks_to_fork, fork_decoding, fork_queued, join_queued
from miro_cy.sched.sequence cimport DECODING, PREFILLING, QUEUED, is_older

ctypedef fused Handle:
    Queued
    Prefilling
    Decoding


cdef void insert(Handle* items, int n, int at, Handle h) noexcept:
    memmove(&items[at + 1], &items[at], (n - at) * sizeof(Handle))
    items[at] = h


cdef void remove(Handle* items, int n, int at) noexcept:
    memmove(&items[at], &items[at + 1], (n - at - 1) * sizeof(Handle))


cdef int position(const Handle* items, int n, int slot) except -1:
    """Where the handle of an entry is in a set."""
    cdef int at
    for at in range(n):
        if items[at].slot == slot:
            return at
    raise InternalError(f"sequence entry {slot} is in no set")


cdef tuple place(const Sequence* seq):
    """By which sequences are older or newer."""
    return seq.order, seq.id


cdef class SequenceSets:
    """The live sequences of a table, by state. One thread."""

    def __cinit__(self, SequenceTable table not None):
        self.table = table
        self._slot_of = {}
        self.waiting = <Queued*> malloc(table.n_entries * sizeof(Queued))
        self.preempted = <Queued*> malloc(table.n_entries * sizeof(Queued))
        self.prefilling = <Prefilling*> malloc(table.n_entries * sizeof(Prefilling))
        self.decoding = <Decoding*> malloc(table.n_entries * sizeof(Decoding))
        if self.waiting == NULL or self.preempted == NULL or self.prefilling == NULL or self.decoding == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.waiting)
        free(self.preempted)
        free(self.prefilling)
        free(self.decoding)

    cdef int64_t add(
        self, const int32_t[::1] tokens, int max_new, int logits_from, double now, extras
    ) except -1:
        """A new sequence at the end of the queue; returns its id."""
        cdef Queued h = self.table.create(self._next_id, tokens, max_new, logits_from, now, extras)
        MIRO_INDEX(self.n_waiting, self.table.n_entries)
        self.waiting[self.n_waiting] = h
        self.n_waiting += 1
        return self._know(h.slot)

    cdef int64_t _know(self, int slot) except -1:
        """The id of a new sequence."""
        self._slot_of[self._next_id] = slot
        self._next_id += 1
        return self._next_id - 1

    cdef Queued find_waiting(self, object id) except *:
        """The handle of a sequence that was never admitted."""
        return self.waiting[position[Queued](self.waiting, self.n_waiting, self._slot_of[id])]

    cdef int admit_waiting(self, object id, double now) except -1:
        """A sequence that was never admitted becomes the last of the prefilling ones."""
        cdef int at = position[Queued](self.waiting, self.n_waiting, self._slot_of[id])
        self._admit(self.waiting[at], now)
        remove[Queued](self.waiting, self.n_waiting, at)
        self.n_waiting -= 1
        return 0

    cdef int admit_preempted(self, double now) except -1:
        """The oldest of the preempted sequences becomes the last of the prefilling ones."""
        MIRO_INDEX(0, self.n_preempted)
        self._admit(self.preempted[0], now)
        remove[Queued](self.preempted, self.n_preempted, 0)
        self.n_preempted -= 1
        return 0

    cdef int _admit(self, Queued h, double now) except -1:
        cdef Prefilling admitted = self.table.admit(h, now)
        MIRO_INDEX(self.n_prefilling, self.table.n_entries)
        self.prefilling[self.n_prefilling] = admitted
        self.n_prefilling += 1
        return 0

    cdef int start_decoding(self, Prefilling h, int token, double now) except -1:
        """A prefilling sequence takes its place among the decoding ones."""
        cdef int at = position[Prefilling](self.prefilling, self.n_prefilling, h.slot)
        cdef Decoding d = self.table.start_decoding(h, token, now)
        remove[Prefilling](self.prefilling, self.n_prefilling, at)
        self.n_prefilling -= 1
        return self._add_decoding(d)

    cdef int _add_decoding(self, Decoding d) except -1:
        cdef int at = self.n_decoding
        while at > 0 and is_older(self.table.decoding(d), self.table.decoding(self.decoding[at - 1])):
            at -= 1
        MIRO_INDEX(self.n_decoding, self.table.n_entries)
        insert[Decoding](self.decoding, self.n_decoding, at, d)
        self.n_decoding += 1
        return 0

    cdef int64_t fork(self, object id, int token, BatchView view, bint has_room) except -1:
        """A new sequence that has what a decoding one has computed, and `token`; returns its id."""
        cdef const Sequence* source = self.find(id)
        cdef Decoding h, forked
        cdef int at = self._behind_family(source)
        if source.state != DECODING:
            raise InternalError(f"sequence {id} does not decode: it cannot be forked")
        h = self.decoding[position[Decoding](self.decoding, self.n_decoding, self._slot_of[id])]
        has_room = has_room and at == 0 and self.table.blocks.n_slots_free > 0
        if has_room and blocks_to_fork(self.table, h) <= self.table.pool.available():
            forked = fork_decoding(self.table, h, self._next_id, token, view)
            self._add_decoding(forked)
            return self._know(forked.slot)
        return self._add_preempted(fork_queued(self.table, h, self._next_id, token), at)

    cdef int64_t join(self, object id, const int32_t[::1] tokens) except -1:
        """A new sequence of the same family with tokens of its own; returns its id."""
        cdef const Sequence* source = self.find(id)
        if source.order < 0:
            raise InternalError(f"sequence {id} was never admitted: none can join it")
        return self._add_preempted(
            join_queued(self.table, self._slot_of[id], self._next_id, tokens), self._behind_family(source))

    cdef int _behind_family(self, const Sequence* seq) except -1:
        """Where among the preempted ones a new sequence of its family belongs; 0: none of it waits, and none older."""
        cdef int at = 0
        while at < self.n_preempted and self.table.queued(self.preempted[at]).order <= seq.order:
            at += 1
        return at

    cdef int64_t _add_preempted(self, Queued h, int at) except -1:
        MIRO_INDEX(self.n_preempted, self.table.n_entries)
        insert[Queued](self.preempted, self.n_preempted, at, h)
        self.n_preempted += 1
        while not self.is_newest(self.table.queued(h)):
            self.preempt_newest()
        return self._know(h.slot)

    cdef int resume(self, object id, int token, double now) except -1:
        """The next token of a running sequence that has computed all it has."""
        cdef const Sequence* seq = self.find(id)
        cdef int slot = self._slot_of[id], at
        if seq.state == PREFILLING:
            at = position[Prefilling](self.prefilling, self.n_prefilling, slot)
            self.start_decoding(self.prefilling[at], token, now)
        elif seq.state == DECODING:
            at = position[Decoding](self.decoding, self.n_decoding, slot)
            self.table.append(self.decoding[at], token)
        else:
            raise InternalError(f"sequence {id} waits for its blocks: it has no use for a token")
        return 0

    cdef bint is_newest(self, const Sequence* seq) except -1:
        """Whether no running sequence is newer than this one."""
        if self.n_prefilling > 0 and is_older(seq, self.table.prefilling(self.prefilling[self.n_prefilling - 1])):
            return False
        return not (
            self.n_decoding > 0 and is_older(seq, self.table.decoding(self.decoding[self.n_decoding - 1])))

    cdef int preempt_newest(self) except -1:
        """The newest running sequence joins the preempted ones, before all that are newer."""
        cdef const Sequence* prefilling = NULL
        cdef const Sequence* decoding = NULL
        cdef Queued h
        cdef int at = 0
        if self.n_prefilling > 0:
            prefilling = self.table.prefilling(self.prefilling[self.n_prefilling - 1])
        if self.n_decoding > 0:
            decoding = self.table.decoding(self.decoding[self.n_decoding - 1])
        if prefilling != NULL and (decoding == NULL or is_older(decoding, prefilling)):
            h = self.table.preempt_prefilling(self.prefilling[self.n_prefilling - 1])
            self.n_prefilling -= 1
        elif decoding != NULL:
            h = self.table.preempt_decoding(self.decoding[self.n_decoding - 1])
            self.n_decoding -= 1
        else:
            raise InternalError("nothing runs that could be preempted")
        while at < self.n_preempted and is_older(self.table.queued(self.preempted[at]), self.table.queued(h)):
            at += 1
        MIRO_INDEX(self.n_preempted, self.table.n_entries)
        insert[Queued](self.preempted, self.n_preempted, at, h)
        self.n_preempted += 1
        self.preemptions += 1
        return 0

    cdef int finish(self, object id) except -1:
        """End a sequence in whatever state it is; its blocks go back and its id is forgotten."""
        cdef const Sequence* seq = self.find(id)
        cdef int slot = self._slot_of[id], at
        if seq.state == QUEUED and seq.order >= 0:
            at = position[Queued](self.preempted, self.n_preempted, slot)
            self.table.forget(self.table.finish_queued(self.preempted[at]))
            remove[Queued](self.preempted, self.n_preempted, at)
            self.n_preempted -= 1
        elif seq.state == QUEUED:
            at = position[Queued](self.waiting, self.n_waiting, slot)
            self.table.forget(self.table.finish_queued(self.waiting[at]))
            remove[Queued](self.waiting, self.n_waiting, at)
            self.n_waiting -= 1
        elif seq.state == PREFILLING:
            at = position[Prefilling](self.prefilling, self.n_prefilling, slot)
            self.table.forget(self.table.finish_prefilling(self.prefilling[at]))
            remove[Prefilling](self.prefilling, self.n_prefilling, at)
            self.n_prefilling -= 1
        elif seq.state == DECODING:
            at = position[Decoding](self.decoding, self.n_decoding, slot)
            self.table.forget(self.table.finish_decoding(self.decoding[at]))
            remove[Decoding](self.decoding, self.n_decoding, at)
            self.n_decoding -= 1
        else:
            raise InternalError(f"sequence {id} was left finished")
        del self._slot_of[id]
        return 0

    cdef int n_running(self) noexcept:
        return self.n_prefilling + self.n_decoding

    cdef bint is_live(self, object id) except -1:
        return id in self._slot_of

    cdef const Sequence* find(self, object id) except NULL:
        """A live sequence, to be read only. InternalError when there is none of that id."""
        slot = self._slot_of.get(id)
        if slot is None:
            raise InternalError(f"no live sequence {id}")
        return self.table.entry(slot)

    def check(self):
        """Raise AssertionError unless the sets, their order and the table agree (promise 3)."""
        ids = [self.table.queued(self.waiting[i]).id for i in range(self.n_waiting)]
        if ids != sorted(ids):
            raise AssertionError(f"out of arrival order: {ids}")
        preempted = [place(self.table.queued(self.preempted[i])) for i in range(self.n_preempted)]
        prefilling = [place(self.table.prefilling(self.prefilling[i])) for i in range(self.n_prefilling)]
        decoding = [place(self.table.decoding(self.decoding[i])) for i in range(self.n_decoding)]
        for orders in (preempted, prefilling, decoding):
            if orders != sorted(orders):
                raise AssertionError(f"out of the order of admission: {orders}")
        running = prefilling + decoding
        if running and preempted and max(running) > preempted[0]:
            raise AssertionError("a running sequence overtook a preempted one")
        if len({*running, *preempted}) + len(ids) != len(self._slot_of):
            raise AssertionError("a live sequence is in no set, or in two")
        if len(self._slot_of) != self.table.n_entries - self.table.n_entries_free:
            raise AssertionError("a finished sequence still has its entry")
        self.table.check()
