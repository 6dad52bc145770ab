"""The mechanism: the error of quantization explained by curvature, over all checkpoints."""
