"""Choosing one sequence's next token from a row of logits.

Draws are a function of (seed, choice, absolute position) and the row alone: a counter-based generator (Philox4x32-10,
Salmon et al. 2011) instead of a stream, so that batching, preemption and resumption cannot change a text.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from miro_cy._kernels.abi cimport Candidate, KernelTable
from miro_cy._kernels.select cimport kernels
from miro_cy.native cimport MIRO_INDEX


cdef enum:
    FIRST_SHORTLIST = 256       # candidates tried first when only top_p limits them; then 8 times as many, and so on


cdef double uniform(uint64_t seed, uint32_t choice, uint32_t position) noexcept nogil:
    """A double in (0, 1): the first 53 bits of Philox4x32-10, half a step off the ends."""
    cdef uint32_t k0 = <uint32_t>seed, k1 = <uint32_t>(seed >> 32)
    cdef uint32_t c0 = position, c1 = choice, c2 = 0, c3 = 0, hi0, hi1
    cdef uint64_t p0, p1
    cdef int _
    for _ in range(10):
        p0 = <uint64_t>0xD2511F53u * c0
        p1 = <uint64_t>0xCD9E8D57u * c2
        hi0 = <uint32_t>(p0 >> 32)
        hi1 = <uint32_t>(p1 >> 32)
        c0, c2 = hi1 ^ c1 ^ k0, hi0 ^ c3 ^ k1
        c1, c3 = <uint32_t>p1, <uint32_t>p0
        k0 += 0x9E3779B9u
        k1 += 0xBB67AE85u
    return ((<double>c0 * 2097152.0) + <double>(c1 >> 11) + 0.5) * 1.1102230246251565e-16


def uniform_at(seed, choice, position):
    """The draw for (seed, choice, position), for tests and tools."""
    return uniform(seed, choice, position)


cdef class TokenSampler:
    """One sequence's sampling: SamplingParams with the seed fixed, and the choice's number."""
    cdef const KernelTable* table
    cdef bint greedy
    cdef float inv_temperature
    cdef float top_p
    cdef Py_ssize_t top_k
    cdef uint64_t seed
    cdef uint32_t choice
    cdef readonly object n_logprobs

    def __init__(self, params, int choice=0):
        self.table = kernels()
        self.greedy = params.greedy
        self.inv_temperature = 1.0 if params.greedy else 1.0 / params.temperature
        self.top_p = params.top_p
        self.top_k = params.top_k
        self.seed = params.seed or 0
        self.choice = choice
        self.n_logprobs = params.logprobs

    def pick(self, const float[:, :] logits not None, Py_ssize_t row, int position):
        """The token for `position` (that of the token itself), or -1 when the row holds NaN or +inf or only -inf."""
        cdef const float* x = &logits[row, 0]
        cdef Py_ssize_t n = logits.shape[1]
        cdef int32_t best = self.table.argmax(x, n)
        if best < 0 or self.greedy:
            return best
        cdef double u = uniform(self.seed, self.choice, position)
        if 0 < self.top_k < n:
            return self.pick_top(x, n, self.top_k, u)
        if self.top_p < 1:
            return self.pick_nucleus(x, n, u)
        cdef float lse = self.table.logsumexp(x, n, self.inv_temperature)
        return self.table.draw(x, n, self.inv_temperature, lse, u)

    cdef int32_t pick_top(self, const float* x, Py_ssize_t n, Py_ssize_t k, double u) except -2:
        """top_k, then top_p within it."""
        cdef Candidate* c = <Candidate*>malloc(k * sizeof(Candidate))
        cdef double total = 0
        cdef Py_ssize_t i
        if c == NULL:
            raise MemoryError()
        try:
            self.table.top_k(x, n, c, k)
            for i in range(k):
                total += self.table.exp((c[i].value - c[0].value) * self.inv_temperature)
            return self.draw_from(c, k, c[0].value, total, u)
        finally:
            free(c)

    cdef int32_t pick_nucleus(self, const float* x, Py_ssize_t n, double u) except -2:
        """top_p over the whole vocabulary: a shortlist that grows until it holds enough probability."""
        cdef Py_ssize_t k = min(n, FIRST_SHORTLIST), i
        cdef Candidate* c
        cdef double total, mass
        while True:
            c = <Candidate*>malloc(k * sizeof(Candidate))
            if c == NULL:
                raise MemoryError()
            try:
                self.table.top_k(x, n, c, k)
                total = self.total_mass(x, n, c[0].value)
                mass = 0
                for i in range(k):
                    mass += self.table.exp((c[i].value - c[0].value) * self.inv_temperature)
                if mass >= self.top_p * total or k == n:
                    return self.draw_from(c, k, c[0].value, total, u)
            finally:
                free(c)
            k = min(n, k * 8)

    cdef double total_mass(self, const float* x, Py_ssize_t n, float top) noexcept:
        """Sum of exp((x - top) / temperature) over the row."""
        return self.table.exp(self.table.logsumexp(x, n, self.inv_temperature) - top * self.inv_temperature)

    cdef int32_t draw_from(self, const Candidate* c, Py_ssize_t k, float top, double total, double u) noexcept:
        """Draw among the fewest of the k sorted candidates whose mass reaches top_p of `total`."""
        cdef double kept = 0, mass = 0, p
        cdef Py_ssize_t i, count = 0
        while count < k and (count == 0 or kept < self.top_p * total):
            kept += self.table.exp((c[count].value - top) * self.inv_temperature)
            count += 1
        for i in range(count):
            p = self.table.exp((c[i].value - top) * self.inv_temperature)
            mass += p
            if p > 0 and mass >= u * kept:
                return c[i].id
        return c[0].id

    def logprob(self, const float[:, :] logits not None, Py_ssize_t row, int token):
        """(log-probability of token, [(id, log-probability)] of the n_logprobs most likely), before any filter."""
        cdef const float* x = &logits[row, 0]
        cdef Py_ssize_t n = logits.shape[1]
        cdef float lse = self.table.logsumexp(x, n, 1.0)
        MIRO_INDEX(token, n)
        return <float>(x[token] - lse), most_likely(self.table, x, n, self.n_logprobs or 0, lse)


cdef list most_likely(const KernelTable* table, const float* x, Py_ssize_t n, Py_ssize_t count, float lse):
    """[(id, log-probability)] of the `count` most likely tokens, best first, ties to the lowest id."""
    cdef Py_ssize_t k = min(n, count), i
    cdef Candidate* c
    if k <= 0:
        return []
    c = <Candidate*>malloc(k * sizeof(Candidate))
    if c == NULL:
        raise MemoryError()
    try:
        table.top_k(x, n, c, k)
        return [(c[i].id, <float>(c[i].value - lse)) for i in range(k)]
    finally:
        free(c)


def top_logprobs(const float[:, :] logits not None, Py_ssize_t row, Py_ssize_t count):
    """[(id, log-probability)] of a row's `count` most likely tokens (all, if there are fewer), best first.

    Log-probabilities are the raw log-softmax. None when the row holds NaN or +inf or only -inf.
    """
    cdef const KernelTable* table = kernels()
    cdef const float* x = &logits[row, 0]
    cdef Py_ssize_t n = logits.shape[1]
    if table.argmax(x, n) < 0:
        return None
    return most_likely(table, x, n, count, table.logsumexp(x, n, 1.0))


def log_softmax_rows(float[:, ::1] logits not None):
    """The sampler's own log-softmax, in place, over every row."""
    cdef Py_ssize_t i
    cdef const KernelTable* table = kernels()
    for i in range(logits.shape[0]):
        table.log_softmax(&logits[i, 0], logits.shape[1], &logits[i, 0])
