"""The DeepSpeed engine, which runs without CUDA too, over gloo."""

from train.deepspeed import process  # noqa: F401  settles what DeepSpeed reads when it is imported
