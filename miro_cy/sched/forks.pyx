"""Forks, see forks.pxd."""

from miro_cy.errors import InternalError

from miro_cy.native cimport SEQUENCES, tally
from miro_cy.sched.sequence cimport DECODING, NOTHING, QUEUED, Sequence, adopt, branch, cached_tokens


cpdef int blocks_to_fork(SequenceTable table, Decoding h) except -1:
    """Blocks that `fork_decoding` takes."""
    return table.blocks.to_fork(table.decoding(h))


cpdef Decoding fork_decoding(SequenceTable table, Decoding h, int64_t sequence_id, int token, BatchView view) except *:
    """Nothing -> Decoding, beside h: what h has computed, in the same blocks, and `token` behind it.

    view: whose next forward pass copies what has to be copied now. Raises InternalError, and nothing is changed,
    without a slot or the `blocks_to_fork`, or when h has no place for another token.
    """
    cdef const Sequence* source = table.decoding(h)
    cdef Sequence* seq
    cdef int slot
    cdef Decoding forked
    if table.blocks.n_slots_free == 0 or blocks_to_fork(table, h) > table.pool.available():
        raise InternalError(f"there is no room for a fork of sequence {source.id}")
    slot = new_entry(table, source, sequence_id, token)
    seq = &table._entry[slot]
    table.blocks.share(source, seq)
    forked = Decoding(slot, table._move(slot, seq.generation, NOTHING, DECODING))
    if table.blocks.reserving:
        table.grow(forked, view)
    return forked


cpdef Queued fork_queued(SequenceTable table, Decoding h, int64_t sequence_id, int token) except *:
    """Nothing -> Queued, beside h: the tokens that h has computed and `token`, all to be computed again."""
    cdef const Sequence* source = table.decoding(h)
    cdef int slot = new_entry(table, source, sequence_id, token)
    cdef Sequence* seq = &table._entry[slot]
    seq.n_cached = cached_tokens(source)
    seq.n_computed = seq.n_borrowed = 0
    return Queued(slot, table._move(slot, seq.generation, NOTHING, QUEUED))


cpdef Queued join_queued(SequenceTable table, int slot, int64_t sequence_id, const int32_t[::1] tokens) except *:
    """Nothing -> Queued, beside the live sequence of an entry: the same prompt and tokens of its own, none computed.

    Raises InternalError when they are not longer than the prompt, or too many.
    """
    cdef const Sequence* source = table.entry(slot)
    cdef int entry = table._unused_entry(), n = <int> tokens.shape[0]
    if not source.n_prompt < n <= source.capacity:
        raise InternalError(f"no sequence of {n} tokens can join sequence {source.id}")
    adopt(&table._entry[entry], sequence_id, source, &tokens[0], n, table.pool.block_size)
    table.n_entries_free -= 1
    tally(SEQUENCES, 1)
    return Queued(entry, table._move(entry, table._entry[entry].generation, NOTHING, QUEUED))


cdef int new_entry(SequenceTable table, const Sequence* source, int64_t sequence_id, int token) except -1:
    cdef int slot = table._unused_entry()
    branch(&table._entry[slot], sequence_id, source, token, table.pool.block_size)
    table.n_entries_free -= 1
    tally(SEQUENCES, 1)
    return slot
