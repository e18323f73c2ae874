# What this machine can do at this instruction-set level: how fast it reads memory, and the peaks of the two
# multiplications that the matmuls are made of. `miro bench` compares what the engine reaches with these.

cdef enum:
    PROBE_ACCUMULATORS = 12     # independent chains: more than latency times throughput of any FMA unit


cdef uint32_t probe_read(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    """XOR of the 32-bit words of n bytes, n a multiple of 512: one load and one cheap operation a vector."""
    cdef vi acc[8]
    cdef int32_t lanes[16]
    cdef uint32_t total = 0
    cdef Py_ssize_t _i
    cdef int j, lane
    for j in range(8):
        acc[j] = vi_zero()
    for _i in range(n // (8 * MI_VL * 4)):
        for j in range(8):
            acc[j] = acc[j] ^ vi_load(p + j * MI_VL * 4)
        p += 8 * MI_VL * 4
    for j in range(8):
        vi_store(lanes, acc[j])
        for lane in range(MI_VL):
            total ^= <uint32_t>lanes[lane]
    return total


cdef void probe_fma(float* x, float a, float b, Py_ssize_t rounds) noexcept nogil:
    """x = x * a + b for fma_lanes floats, `rounds` times, all of them in registers."""
    cdef vf acc[PROBE_ACCUMULATORS]
    cdef vf av = vf_set1(a)
    cdef vf bv = vf_set1(b)
    cdef Py_ssize_t _r
    cdef int i, j
    for i in range(PROBE_ACCUMULATORS):
        acc[i] = vf_load(x + i * MI_VL)
    for _r in range(rounds):
        for i in range(6):
            for j in range(2):
                acc[i * 2 + j] = vf_fma(acc[i * 2 + j], av, bv)
    for i in range(PROBE_ACCUMULATORS):
        vf_store(x + i * MI_VL, acc[i])


cdef inline void probe_dot_tile(
    const int mr, const int nv, const uint8_t* w, const int8_t* x, int32_t* out, Py_ssize_t rounds
) noexcept nogil:
    """mr activations x nv vectors of weights, as the int8 matmul does it for weights below 16."""
    cdef vi total[PROBE_ACCUMULATORS]
    cdef vi narrow[PROBE_ACCUMULATORS]
    cdef vi xv[8]
    cdef vi wv
    cdef const uint8_t* wq
    cdef Py_ssize_t _r
    cdef int i, v, _s, _run
    for i in range(mr):
        xv[i] = vi_set1_bytes(x + i * 4)
        for v in range(nv):
            total[i * nv + v] = vi_zero()
    for _r in range(rounds):
        wq = w
        for _run in range(PROBE_QUADS // 4):
            if MI_NARROW:
                for i in range(mr):
                    for v in range(nv):
                        narrow[i * nv + v] = vi_zero()
            for _s in range(4):
                for v in range(nv):
                    wv = vi_load(wq)
                    wq += MI_VL * 4
                    for i in range(mr):
                        if MI_NARROW:
                            narrow[i * nv + v] = vi_dot_u8(narrow[i * nv + v], wv, xv[i])
                        else:
                            total[i * nv + v] = vi_dot_u8(total[i * nv + v], wv, xv[i])
            if MI_NARROW:
                for i in range(mr):
                    for v in range(nv):
                        total[i * nv + v] = vi_widen(total[i * nv + v], narrow[i * nv + v])
    for i in range(mr):
        for v in range(nv):
            vi_store(out + (i * nv + v) * MI_VL, total[i * nv + v])


cdef void probe_dot(const uint8_t* w, const int8_t* x, int32_t* out, Py_ssize_t rounds) noexcept nogil:
    # Sums that need widening take two registers each, so fewer of them; their chains are short.
    if MI_NARROW:
        probe_dot_tile(4, 1, w, x, out, rounds)
    else:
        probe_dot_tile(6, 2, w, x, out, rounds)
