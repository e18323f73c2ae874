# The table of a level: every kernel by its name in abi.pxd.

from cpython.pycapsule cimport PyCapsule_New

cdef KernelTable TABLE
TABLE.pack_f32 = pack_f32
TABLE.pack_16bit = pack_16bit
TABLE.pack_q8_0 = pack_q8_0
TABLE.pack_q4 = pack_q4
TABLE.pack_q6_k = pack_q6_k
TABLE.scan = scan
TABLE.matmul_f32 = matmul_f32
TABLE.matmul_i8 = matmul_i8
TABLE.swiglu_i8 = swiglu_i8
TABLE.embed = embed
TABLE.quantise = quantise
TABLE.add_rmsnorm = add_rmsnorm
TABLE.swiglu = swiglu
TABLE.rope = rope
TABLE.kv_write = kv_write
TABLE.attention = attention
TABLE.argmax = argmax
TABLE.logsumexp = logsumexp
TABLE.log_softmax = log_softmax
TABLE.top_k = top_k
TABLE.draw = draw
TABLE.exp = exp_row
TABLE.probe_read = probe_read
TABLE.probe_fma = probe_fma
TABLE.probe_dot = probe_dot
TABLE.fma_lanes = PROBE_ACCUMULATORS * MI_VL
TABLE.dot_rows = 4 if MI_NARROW else 6
TABLE.dot_lanes = MI_VL if MI_NARROW else 2 * MI_VL
TABLE.tiles = MI_TILES


def table():
    """The KernelTable, as a capsule."""
    return PyCapsule_New(&TABLE, "miro_cy.KernelTable", NULL)
