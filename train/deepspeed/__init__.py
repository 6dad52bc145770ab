"""The DeepSpeed engine, which runs without CUDA too, over gloo."""

from train.deepspeed import setup  # noqa: F401  settles what DeepSpeed reads when it is imported
