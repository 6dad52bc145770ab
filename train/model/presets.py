"""The released models this project trains, as configurations: sizes are in their families' rows."""

from functools import partial

from train.model.config import ModelConfig
from train.model.families import TRAINED


def as_released(
    family: str,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    key_value_heads: int | None = None,
) -> ModelConfig:
    """Return a model of these sizes, otherwise as all released ones of its family."""
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
        initializer=TRAINED[family].initializer,
        **TRAINED[family].released,
    )


olmo2 = partial(as_released, "olmo2")
pythia = partial(as_released, "gpt_neox")


def _preset(family: str, name: str) -> ModelConfig:
    return as_released(family, **TRAINED[family].sizes[name])


OLMO2_30M = _preset("olmo2", "30M")
OLMO2_190M = _preset("olmo2", "190M")
OLMO2_1B = _preset("olmo2", "1B")
OLMO2_7B = _preset("olmo2", "7B")
OLMO2_13B = _preset("olmo2", "13B")
OLMO2_32B = _preset("olmo2", "32B")
PYTHIA_70M = _preset("gpt_neox", "70M")
PYTHIA_160M = _preset("gpt_neox", "160M")
