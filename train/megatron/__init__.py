"""The megatron-core engine, which runs without CUDA too, over gloo."""

from train.megatron import cpu  # noqa: F401  stands in for CUDA before megatron-core is imported
