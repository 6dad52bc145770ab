"""The quantization step from the full-precision weights, and the loss along it."""
