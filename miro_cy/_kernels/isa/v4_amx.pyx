"""The kernels, compiled for one instruction-set level (flags in setup.py)."""
include "../impl/all_tiles.pxi"
