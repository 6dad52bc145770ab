"""Quantized checkpoints in the GPTQ format, which gptqmodel, vLLM and transformers load."""
