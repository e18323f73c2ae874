"""A BatchView as the plain pointers that kernels take."""

from miro_cy._kernels.abi cimport BatchRows
from miro_cy.batch cimport BatchView


cdef inline void bind_rows(BatchView view, BatchRows* rows) noexcept:
    """rows points into the view's arrays, and to the first group's table."""
    rows.n_rows = view.n_rows
    rows.n_tokens = view.n_tokens
    rows.slot = &view.slot[0]
    rows.first_pos = &view.first_pos[0]
    rows.n_tok = &view.n_tok[0]
    rows.offset = &view.offset[0]
    rows.table = &view.tables[0, 0, 0]
    rows.table_stride = view.tables.shape[2]
    rows.n_slots = view.tables.shape[1]
