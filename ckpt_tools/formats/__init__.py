"""How weights lie in files, read and written by the row: HF's safetensors, megatron's shards, DeepSpeed's ranges."""
