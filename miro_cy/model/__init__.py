"""From a checkpoint to logits.

spec        ModelSpec: what a decoder computes, as data; nothing else in the engine knows an architecture's name
checkpoint  Checkpoint: a spec and the tensors it needs, by role, whatever the format
gguf_llama  the Checkpoint in a GGUF file
hf_llama    the Checkpoint in a Hugging Face folder
opening     which of the two a path holds
weights     packs a checkpoint's tensors for the kernels
rope        rotary tables, made once from the configured context
executor    Executor.forward(BatchView) -> logits rows, on the CPU
"""
