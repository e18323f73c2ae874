"""How an entry of the table becomes a sequence, see sequence.pxd."""

from libc.math cimport NAN
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from miro_cy.errors import InternalError


cdef int start(
    Sequence* seq, int64_t id, const int32_t* tokens, int n_tokens, int capacity, int block_size
) except -1:
    """Fill an unused entry with a prompt. Room for all it may come to have: nothing can fail half-way through a step.
    Untouched pages cost nothing. MemoryError leaves the entry unused."""
    allocate(seq, capacity, block_size)
    memcpy(seq.tokens, tokens, n_tokens * sizeof(int32_t))
    seq.id = seq.family = id
    seq.order = -1
    seq.n_prompt = seq.n_tokens = seq.n_cached = n_tokens
    seq.capacity = capacity
    seq.n_computed = seq.n_borrowed = seq.chain.n_hashed = seq.chain.n_shared = 0
    seq.logits_from = seq.table_slot = -1
    seq.admitted = seq.first_token = NAN
    return 0


cdef int branch(Sequence* seq, int64_t id, const Sequence* source, int token, int block_size) except -1:
    """Fill an unused entry with what another has computed, and `token` behind it; it owns no blocks as yet."""
    if token < 0 or source.n_tokens - source.n_computed > 1 or source.n_computed == source.capacity:
        raise InternalError(f"sequence {source.id} cannot be forked with token {token} now")
    inherit(seq, id, source, block_size)
    seq.n_tokens = source.n_computed + 1
    seq.chain.n_hashed = min(source.chain.n_hashed, source.n_computed // block_size)
    memcpy(seq.tokens, source.tokens, source.n_computed * sizeof(int32_t))
    memcpy(seq.chain.hash, source.chain.hash, seq.chain.n_hashed * sizeof(uint64_t))
    seq.tokens[source.n_computed] = token
    return 0


cdef int adopt(
    Sequence* seq, int64_t id, const Sequence* source, const int32_t* tokens, int n_tokens, int block_size
) except -1:
    """Fill an unused entry with what makes another what it is, but tokens of its own, none of them computed."""
    inherit(seq, id, source, block_size)
    seq.n_cached = cached_tokens(source)
    seq.n_tokens = n_tokens
    seq.n_computed = seq.n_borrowed = seq.chain.n_hashed = 0
    memcpy(seq.tokens, tokens, n_tokens * sizeof(int32_t))
    return 0


cdef int inherit(Sequence* seq, int64_t id, const Sequence* source, int block_size) except -1:
    """Copy all that does not depend on the tokens; it owns no blocks."""
    cdef uint32_t generation = seq.generation
    cdef int32_t* tokens
    cdef uint64_t* hashes
    allocate(seq, source.capacity, block_size)
    tokens, hashes = seq.tokens, seq.chain.hash
    seq[0] = source[0]
    seq.tokens, seq.chain.hash = tokens, hashes
    seq.generation, seq.state = generation, NOTHING
    seq.id, seq.table_slot = id, -1
    seq.chain.n_shared = 0
    return 0


cdef int allocate(Sequence* seq, int capacity, int block_size) except -1:
    seq.tokens = <int32_t*> malloc(<size_t> capacity * sizeof(int32_t))
    seq.chain.hash = <uint64_t*> malloc((<size_t> capacity // block_size + 1) * sizeof(uint64_t))
    if seq.tokens == NULL or seq.chain.hash == NULL:
        forget_tokens(seq)
        raise MemoryError()
    return 0


cdef void forget_tokens(Sequence* seq) noexcept:
    free(seq.tokens)
    free(seq.chain.hash)
    seq.tokens = NULL
    seq.chain.hash = NULL
