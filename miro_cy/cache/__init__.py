"""KV cache bookkeeping: which block belongs to whom. Ints only; the executor owns the memory the block ids name."""
