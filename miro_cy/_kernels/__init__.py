"""The kernels: no Python objects, no policy.

abi.pxd         layouts, buffers and the table of functions each build fills: start here
include/vec.h   vector types, half conversion, int8 dot products
include/tiles.h tile registers (AMX), and the float16 vectors that weights are opened in
impl/*.pxi      the kernels, one family a file; plain loops unless a comment says why not
isa/*.pyx       two-line stubs: the same source for each instruction-set level
select          picks the build at import (MIRO_ISA forces one)
memory          arrays that begin with a cache line, and arenas of them in large pages
kv              a layer's KV pool; rows  a batch as plain pointers
weights         packed weight matrices
probe           what the machine can do at a level, for `miro bench`
ops             shape-checked Python wrappers, for tests and benchmarks
reference       the NumPy twin of every kernel: the specification that tests compare with; reference_tiles of v4_amx
"""
