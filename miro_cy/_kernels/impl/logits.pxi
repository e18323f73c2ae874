# One row of logits: argmax, log-softmax over fixed chunks merged in order, partial selection, inverse-CDF draw.

cdef enum:
    VOCAB_CHUNK = 4096
    DRAW_CHUNK = 256        # ids whose probabilities a draw sums before it looks closer
    SCAN = 64               # values looked at together


cdef inline bint any_from(const float* x, float least, bint above) noexcept nogil:
    """Whether one of SCAN values is above `least`, or equal to it."""
    cdef int32_t hit = 0
    cdef int j
    if above:
        for j in range(SCAN):
            hit |= x[j] > least
    else:
        for j in range(SCAN):
            hit |= x[j] == least
    return hit != 0


cdef int32_t argmax(const float* x, Py_ssize_t n) noexcept nogil:
    cdef float lane[16]
    cdef float top = -INFINITY
    cdef uint32_t bad = 0
    cdef Py_ssize_t i, j, whole = n // 16 * 16
    for j in range(16):
        lane[j] = -INFINITY
    for i in range(0, whole, 16):
        for j in range(16):
            bad |= not (x[i + j] < INFINITY)
            lane[j] = x[i + j] if x[i + j] > lane[j] else lane[j]
    for i in range(whole, n):
        bad |= not (x[i] < INFINITY)
        lane[i - whole] = x[i] if x[i] > lane[i - whole] else lane[i - whole]
    for j in range(16):
        top = lane[j] if lane[j] > top else top
    if bad or top == -INFINITY:
        return -1
    i = 0
    while i + SCAN <= n and not any_from(x + i, top, False):
        i += SCAN
    while x[i] != top:
        i += 1
    return <int32_t>i


cdef inline float chunk_max(const float* x, Py_ssize_t n) noexcept nogil:
    cdef float lane[16]
    cdef float top
    cdef Py_ssize_t i, j, whole = n // 16 * 16
    for j in range(16):
        lane[j] = -INFINITY
    for i in range(0, whole, 16):
        for j in range(16):
            lane[j] = x[i + j] if x[i + j] > lane[j] else lane[j]
    for i in range(whole, n):
        lane[i - whole] = x[i] if x[i] > lane[i - whole] else lane[i - whole]
    top = lane[0]
    for j in range(1, 16):
        top = lane[j] if lane[j] > top else top
    return top


cdef inline float chunk_sum_exp(const float* x, Py_ssize_t n, float inv_temperature, float top) noexcept nogil:
    """sum of exp((x - top) * inv_temperature)"""
    cdef float lane[16]
    cdef Py_ssize_t i, j, whole = n // 16 * 16
    for j in range(16):
        lane[j] = 0
    for i in range(0, whole, 16):
        for j in range(16):
            lane[j] = lane[j] + expf_fast((x[i + j] - top) * inv_temperature)
    for i in range(whole, n):
        lane[i - whole] = lane[i - whole] + expf_fast((x[i] - top) * inv_temperature)
    return mi_fold16(lane)


cdef float logsumexp(const float* x, Py_ssize_t n, float inv_temperature) noexcept nogil:
    cdef float top = -INFINITY, s = 0, m, f, new_top
    cdef Py_ssize_t c, i, size
    for c in range((n + VOCAB_CHUNK - 1) // VOCAB_CHUNK):
        i = c * VOCAB_CHUNK
        size = min(VOCAB_CHUNK, n - i)
        m = chunk_max(x + i, size)
        if m == -INFINITY:
            continue
        f = chunk_sum_exp(x + i, size, inv_temperature, m)
        new_top = m if m > top else top
        s = mi_fma(s, expf_fast((top - new_top) * inv_temperature), f * expf_fast((m - new_top) * inv_temperature))
        top = new_top
    return mi_fma(top, inv_temperature, logf(s))


cdef void log_softmax(const float* x, Py_ssize_t n, float* y) noexcept nogil:
    cdef float lse = logsumexp(x, n, 1.0)
    cdef Py_ssize_t i
    for i in range(n):
        y[i] = x[i] - lse


cdef inline bint better(Candidate a, Candidate b) noexcept nogil:
    return a.value > b.value or (a.value == b.value and a.id < b.id)


cdef inline void sift_down(Candidate* heap, Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """Heap with the worst candidate at its root."""
    cdef Candidate item = heap[i]
    cdef Py_ssize_t child = 2 * i + 1
    while child < n:
        if child + 1 < n and better(heap[child], heap[child + 1]):
            child += 1
        if not better(item, heap[child]):
            break
        heap[i] = heap[child]
        i = child
        child = 2 * i + 1
    heap[i] = item


cdef void top_k(const float* x, Py_ssize_t n, Candidate* out, Py_ssize_t k) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef Candidate item
    for i in range(k):
        out[i].value = x[i]
        out[i].id = <int32_t>i
    for i in range(k // 2 - 1, -1, -1):
        sift_down(out, i, k)
    i = k
    while i < n:
        if i + SCAN <= n and not any_from(x + i, out[0].value, True):
            i += SCAN
            continue
        for i in range(i, min(i + SCAN, n)):
            if x[i] > out[0].value:     # a tie never displaces: its id is higher
                out[0].value = x[i]
                out[0].id = <int32_t>i
                sift_down(out, 0, k)
        i += 1
    for j in range(k - 1, 0, -1):       # heap sort: worst to the end
        item = out[0]
        out[0] = out[j]
        out[j] = item
        sift_down(out, 0, j)


cdef inline float mass_of(const float* x, Py_ssize_t n, float inv_temperature, float lse) noexcept nogil:
    """sum of exp(x * inv_temperature - lse)"""
    cdef float lane[16]
    cdef Py_ssize_t i, j, whole = n // 16 * 16
    for j in range(16):
        lane[j] = 0
    for i in range(0, whole, 16):
        for j in range(16):
            lane[j] = lane[j] + expf_fast(mi_fma(x[i + j], inv_temperature, -lse))
    for i in range(whole, n):
        lane[i - whole] = lane[i - whole] + expf_fast(mi_fma(x[i], inv_temperature, -lse))
    return mi_fold16(lane)


cdef int32_t draw(const float* x, Py_ssize_t n, float inv_temperature, float lse, double u) noexcept nogil:
    # Whole chunks are skipped by their sums; the chunk that reaches u is walked id by id. A sum over lanes may differ
    # from one id after another in its last bits: a chunk in which the walk falls short gives its last possible id.
    cdef double total = 0, mass
    cdef int32_t last = -1
    cdef float p
    cdef Py_ssize_t c, i, size
    for c in range((n + DRAW_CHUNK - 1) // DRAW_CHUNK):
        size = min(DRAW_CHUNK, n - c * DRAW_CHUNK)
        mass = mass_of(x + c * DRAW_CHUNK, size, inv_temperature, lse)
        if total + mass < u and c < (n - 1) // DRAW_CHUNK:
            total += mass
            continue
        for i in range(c * DRAW_CHUNK, c * DRAW_CHUNK + size):
            p = expf_fast(mi_fma(x[i], inv_temperature, -lse))
            if p > 0:
                total += p
                last = <int32_t>i
                if total >= u:
                    return last
        if last >= 0:
            return last
    return last_possible(x, n, inv_temperature, lse)


cdef int32_t last_possible(const float* x, Py_ssize_t n, float inv_temperature, float lse) noexcept nogil:
    """The last id of probability above 0: rounding left the sum of all just short of what was drawn."""
    cdef Py_ssize_t i
    for i in range(n - 1, -1, -1):
        if expf_fast(mi_fma(x[i], inv_temperature, -lse)) > 0:
            return <int32_t>i
    return -1


cdef float exp_row(float x) noexcept nogil:
    return expf_fast(x)
