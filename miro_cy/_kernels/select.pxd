from miro_cy._kernels.abi cimport KernelTable


cdef const KernelTable* kernels() noexcept
