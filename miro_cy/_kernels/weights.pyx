"""Weight matrices in the kernels' layouts (abi.pxd), packed once from the bytes of a model file."""

from cython.parallel cimport prange
from libc.stdint cimport int8_t, uint8_t, uintptr_t

import numpy as np

from miro_cy._kernels.abi cimport (
    LAYOUT_BF16, LAYOUT_F16, LAYOUT_F32, LAYOUT_Q4, LAYOUT_Q8, PANEL, KernelTable, is_float_layout,
)
from miro_cy._kernels.select cimport kernels
from miro_cy.native cimport WEIGHT_BYTES, WEIGHTS, tally

from miro_cy._kernels.memory import in_lines

#: kind -> (layout, group, block, high bits, zero, has minima, packed bytes a block of 16 rows,
#:          file elements a block, file bytes a block)
FORMATS = {
    "F32": (LAYOUT_F32, 1, 1, 0, 0, 0, 64, 1, 4),
    "F16": (LAYOUT_F16, 1, 1, 0, 0, 0, 32, 1, 2),
    "BF16": (LAYOUT_BF16, 1, 1, 0, 0, 0, 32, 1, 2),
    "Q8_0": (LAYOUT_Q8, 32, 32, 0, 0, 0, 544, 32, 34),
    "Q4_0": (LAYOUT_Q4, 32, 32, 0, 8, 0, 288, 32, 18),
    "Q4_1": (LAYOUT_Q4, 32, 32, 0, 0, 1, 320, 32, 20),
    "Q6_K": (LAYOUT_Q4, 16, 256, 2, 32, 0, 3360, 256, 210),
}


def packed_nbytes(str kind not None, Py_ssize_t n, Py_ssize_t k):
    """Bytes that a matrix [n, k] of a kind of FORMATS takes when packed."""
    block, block_bytes = FORMATS[kind][2], FORMATS[kind][6]
    return (n + PANEL - 1) // PANEL * (k // block * block_bytes)


def buffer_nbytes(str kind not None, Py_ssize_t n, Py_ssize_t k):
    """Bytes that such a matrix takes of an Arena: packed, the exponents of its panels, and what rounding takes."""
    return in_lines(packed_nbytes(kind, n, k) + (n + PANEL - 1) // PANEL + 64)


cdef class PackedWeights:
    """W [n, k] for y = x W^T.

    raw: uint8, the n rows as the model file stores them; kind: a key of FORMATS; arena: a memory.Arena to lie in.
    Raises ValueError when the sizes do not match (callers check files before they come here).
    """

    def __cinit__(
        self, const uint8_t[::1] raw not None, str kind not None, Py_ssize_t n, Py_ssize_t k, int threads=1,
        arena=None,
    ):
        if kind not in FORMATS:
            raise ValueError(f"no packed layout for {kind}")
        layout, group, block, high_bits, zero, has_min, block_bytes, file_block, file_bytes = FORMATS[kind]
        if n < 1 or k < 1 or k % file_block or raw.shape[0] != n * (k // file_block) * file_bytes:
            raise ValueError(f"{kind} matrix of {n} x {k} cannot have {raw.shape[0]} bytes")
        self.kind = kind
        self.matrix.layout = layout
        self.matrix.group = group
        self.matrix.block = block
        self.matrix.high_bits = high_bits
        self.matrix.zero = zero
        self.matrix.has_min = has_min
        self.matrix.n = n
        self.matrix.k = k
        self.matrix.n_panels = (n + PANEL - 1) // PANEL
        self.matrix.block_bytes = block_bytes
        self.matrix.panel_bytes = k // block * block_bytes
        cdef Py_ssize_t size = self.matrix.n_panels * (self.matrix.panel_bytes + 1) + 64
        self.buffer = np.empty(size, np.uint8) if arena is None else arena.zeros(size, np.uint8)
        self.counted = self.buffer.nbytes
        tally(WEIGHTS, 1)
        tally(WEIGHT_BYTES, self.counted)
        cdef uint8_t[::1] view = self.buffer
        cdef uint8_t* data = <uint8_t*>((<uintptr_t>&view[0] + 63) & ~<uintptr_t>63)
        self.matrix.data = data
        self.matrix.exponent = <const int8_t*>(data + self.matrix.n_panels * self.matrix.panel_bytes)
        self.fill(data, &raw[0], k // file_block * file_bytes, threads)

    def __dealloc__(self):
        if self.counted > 0:
            tally(WEIGHTS, -1)
            tally(WEIGHT_BYTES, -self.counted)

    cdef fill(self, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, int threads):
        cdef const KernelTable* table = kernels()
        cdef PackedMatrix* w = &self.matrix
        cdef int8_t* exponent = <int8_t*>w.exponent
        cdef Py_ssize_t p
        for p in prange(w.n_panels, nogil=True, num_threads=threads, schedule="static"):
            if w.layout == LAYOUT_F32:
                table.pack_f32(w, dst, src, row_bytes, p, p + 1)
            elif is_float_layout(w.layout):
                table.pack_16bit(w, dst, src, row_bytes, p, p + 1)
            elif w.layout == LAYOUT_Q8:
                table.pack_q8_0(w, dst, src, row_bytes, p, p + 1)
            elif w.high_bits == 2:
                table.pack_q6_k(w, dst, src, row_bytes, p, p + 1)
            else:
                table.pack_q4(w, dst, src, row_bytes, p, p + 1)
            if not is_float_layout(w.layout):
                table.scan(w, dst, exponent, p, p + 1)

    @property
    def shape(self):
        return (self.matrix.n, self.matrix.k)

    @property
    def nbytes(self):
        """Bytes of the packed form."""
        return self.matrix.n_panels * self.matrix.panel_bytes

    @property
    def is_float(self):
        """True for F32, F16 and BF16, which are never multiplied in integers."""
        return is_float_layout(self.matrix.layout)
