"""Turning logits into tokens: parameters and their limits (`params`), and the sampler over the kernels (`sampler`)."""
