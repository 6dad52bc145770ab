"""The megatron-core engine. Importing it needs megatron-core; without CUDA it runs on CPU over gloo."""

from train.megatron import cpu  # noqa: F401  stands in for CUDA before megatron-core is imported
