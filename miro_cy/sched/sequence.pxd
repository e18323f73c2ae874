"""A sequence as the scheduler keeps it, and what follows from it by arithmetic alone.

The tokens of a sequence:

        0 ......... n_computed ......... n_tokens ......... capacity = n_prompt + max_new
        in the KV cache   to be computed        to be generated

A Decoding sequence has one token to be computed: the one it generated last. A Queued one has n_computed 0; `admit` and
`catch_up` set it to the end of the blocks that the prefix index lends, if it has any. Those end before the last token
and before the first scored one: whatever needs logits is computed afresh.
A fork has what its sequence has computed, and a token of its own behind that.
Logits are needed at the last token (n_tokens - 1), and of a scored prompt at every position from logits_from on.
"""

from libc.math cimport isnan
from libc.stdint cimport int32_t, int64_t, uint32_t

from miro_cy.cache.prefix cimport Chain

cdef enum State:
    NOTHING = 0
    QUEUED = 1
    PREFILLING = 2
    DECODING = 3
    FINISHED = 4

cdef struct Sequence:
    int64_t id             # grows with arrival
    int64_t family         # id of the sequence that it and its relatives descend from by forks, maybe its own
    int64_t order          # of its family; grows with the first admission; -1: not yet
    State state
    uint32_t generation
    int32_t* tokens        # [capacity], owned by the entry
    int n_prompt
    int n_tokens           # prompt and generated
    int capacity           # n_prompt + max_new
    int n_computed         # tokens in the KV cache
    int logits_from        # first position whose logits are wanted and not yet computed; -1: only the last token's
    int table_slot         # slot in the block tables while Prefilling or Decoding, else -1
    int n_borrowed         # tokens that the prefix index lent since the last admission
    int n_cached           # fewest of them over the earlier admissions, at first the whole prompt
    Chain chain            # its full blocks in the prefix index
    double arrival         # seconds by the scheduler's clock; NaN: not yet
    double admitted
    double first_token


cdef int start(
    Sequence* seq, int64_t id, const int32_t* tokens, int n_tokens, int capacity, int block_size) except -1
cdef int branch(Sequence* seq, int64_t id, const Sequence* source, int token, int block_size) except -1
cdef int adopt(
    Sequence* seq, int64_t id, const Sequence* source, const int32_t* tokens, int n_tokens, int block_size) except -1
cdef void forget_tokens(Sequence* seq) noexcept


cdef inline bint is_older(const Sequence* a, const Sequence* b) noexcept:
    """Whether a comes before b in the order of first admission; a fork comes behind its family."""
    return a.order < b.order or (a.order == b.order and a.id < b.id)


cdef inline int stored_limit(const Sequence* seq) noexcept:
    """Tokens whose keys and values are ever stored: the last generated one is never fed back."""
    return max(seq.n_prompt, seq.capacity - 1)


cdef inline int to_compute(const Sequence* seq) noexcept:
    """Tokens to be computed before the next one can be generated; 0 for a sequence that waits to be finished."""
    return min(seq.n_tokens, stored_limit(seq)) - seq.n_computed


cdef inline int logits_rows(const Sequence* seq, int n_tok) noexcept:
    """Of the next n_tok tokens to compute, how many at their end need logits."""
    cdef int end = seq.n_computed + n_tok
    cdef int last = end == seq.n_tokens
    if seq.logits_from < 0:
        return last
    return max(last, end - max(seq.n_computed, seq.logits_from))


cdef inline int cached_tokens(const Sequence* seq) noexcept:
    """Prompt tokens that it never had to compute. What it finds of its own after a preemption does not count."""
    if isnan(seq.admitted):
        return 0
    return min(seq.n_cached, seq.n_borrowed) if seq.table_slot >= 0 else seq.n_cached
