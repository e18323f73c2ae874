"""BatchView: the one thing the scheduler hands to an executor. Plain ints; no tensor, no model, no policy.

    row i of a view, a run of consecutive tokens of one sequence:

        positions   first_pos[i] ........................ first_pos[i] + n_tok[i] - 1
        tokens      tokens[offset[i]] ................... tokens[offset[i] + n_tok[i] - 1]
        logits      only for the last n_log[i] of them (0: none, n_tok[i]: all)
        KV blocks   tables[group, slot[i], position // block_size]

Everything before first_pos[i] is already in the KV cache; the row's own tokens are written to it by the forward pass.
Before it writes anything, it copies whole blocks, in the order of the list: that is how a sequence gets a block of its
own in place of one that it shared. Copies stay on the list until they are made, whatever becomes of a plan.
A decode row has one token; speculation will give it more. Rows with the same slot never appear twice in a view.
"""

from libc.stdint cimport int32_t


cdef class BatchView:
    cdef readonly int n_rows       # rows in use
    cdef readonly int n_tokens     # tokens over all rows
    cdef readonly int n_logits     # logits rows the executor will return, in row order
    cdef readonly int max_rows
    cdef readonly int max_tokens
    cdef readonly int n_copies     # copies still to be made
    cdef readonly int max_copies   # one a slot and group
    cdef int32_t[::1] slot         # [max_rows]
    cdef int32_t[::1] first_pos    # [max_rows]
    cdef int32_t[::1] n_tok        # [max_rows]
    cdef int32_t[::1] n_log        # [max_rows]
    cdef int32_t[::1] offset       # [max_rows] first index into tokens
    cdef int32_t[::1] tokens       # [max_tokens]
    cdef int32_t[:, ::1] copy      # [max_copies, 3] group, block to copy from, block to copy to
    cdef int32_t[:, :, ::1] tables  # [groups, slots, max_blocks], owned by the cache, shared by all views

    cpdef void clear(self)
    cdef int push_row(self, int slot, int first_pos, const int32_t* tokens, int n_tok, int n_log) except -1
    cdef int push_copy(self, int group, int source, int target) except -1
    cpdef void copies_made(self)
