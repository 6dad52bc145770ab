"""Mistral (arXiv 2310.06825): a Llama, where it attends to all tokens before."""

from train.model.families.family import Family

MISTRAL = Family(title="Mistral", architecture="MistralForCausalLM")
