"""One module per instruction-set level; only the chosen one is ever imported (`miro_cy._kernels.select`)."""
