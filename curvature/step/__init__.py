"""The quantization step: where it leads from the full-precision weights, and what the loss does along it."""
