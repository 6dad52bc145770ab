"""Qwen2 (arXiv 2407.10671), a Llama with biases, and Qwen3, with norms of queries and keys."""

from train.model.families.family import Family

QWEN2 = Family(title="Qwen2", architecture="Qwen2ForCausalLM")
QWEN3 = Family(title="Qwen3", architecture="Qwen3ForCausalLM", query_key_norm="heads")
