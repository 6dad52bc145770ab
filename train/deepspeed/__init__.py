"""The DeepSpeed engine. Importing it needs deepspeed; without CUDA it runs on CPU over gloo."""

from train.deepspeed import process  # noqa: F401  settles what DeepSpeed reads when it is imported
