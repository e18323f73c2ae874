"""From a checkpoint to logits.

spec        ModelSpec: what a decoder computes, as data; nothing else in the engine knows an architecture's name
gguf_llama  reads a ModelSpec and the names of its tensors out of a GGUF file
weights     packs a file's tensors for the kernels
rope        rotary tables, made once from the configured context
executor    Executor.forward(BatchView) -> logits rows, on the CPU
"""
