# all.pxi where there are tile registers: activations in bfloat16, and matmuls in tiles.

include "vec.pxi"
include "int8.pxi"
include "rows_bf16.pxi"
include "rows.pxi"
include "unpack.pxi"
include "pack.pxi"
include "matmul_float.pxi"
include "tile_open.pxi"
include "matmul_tile.pxi"
include "matmul_split.pxi"
include "swiglu_i8.pxi"
include "kv_cache.pxi"
include "kv_tile.pxi"
include "attention_item.pxi"
include "attention_float.pxi"
include "attention_tile.pxi"
include "attention.pxi"
include "logits.pxi"
include "probe.pxi"
include "probe_tile.pxi"
include "table.pxi"

TABLE.matmul_f32 = matmul_f32_or_split
TABLE.probe_tile = probe_tile
