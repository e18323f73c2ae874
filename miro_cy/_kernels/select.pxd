from miro_cy._kernels.abi cimport KernelTable


cdef const KernelTable* kernels() noexcept
cdef const KernelTable* table_of(str name) except NULL
