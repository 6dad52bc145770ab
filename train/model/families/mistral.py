"""Mistral (arXiv 2310.06825): a Llama, whose first version attends in windows."""

from train.model.families.family import Family

MISTRAL = Family(title="Mistral", architecture="MistralForCausalLM", windows="one_rotary")
