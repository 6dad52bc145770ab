"""Formats of weights, by the row: HF's safetensors, megatron's shards, DeepSpeed's ranges."""
