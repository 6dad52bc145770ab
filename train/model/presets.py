"""The released models this project trains, as configurations.

OLMo2: arXiv 2501.00656 and allenai/OLMo, configs/official-*; its ladder of small models is
allenai/OLMo-core's. Pythia: arXiv 2304.01373, as transformers builds it.
"""

from train.model.config import ModelConfig

OLMO2_VOCAB_SIZE = 100_352  # 100,278 tokens, padded
PYTHIA_VOCAB_SIZE = 50_304  # 50,277 tokens, padded


def olmo2_ladder_intermediate_size(hidden_size: int) -> int:
    """Return the MLP width of OLMo-core's ladder: 1.5 x 8/3 hidden, up to a multiple of 256.

    Example:
        >>> olmo2_ladder_intermediate_size(768)
        3072
    """
    width = int(1.5 * (8 * hidden_size // 3))
    return -(-width // 256) * 256


def olmo2(
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    key_value_heads: int | None = None,
) -> ModelConfig:
    """Return an OLMo2 of these sizes, otherwise as all released ones: ModelConfig's defaults."""
    return ModelConfig(
        vocab_size=OLMO2_VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
    )


def pythia(*, hidden_size: int, layers: int, heads: int) -> ModelConfig:
    """Return a Pythia of these sizes: a quarter of a head rotates, biases, MLP of 4 x hidden."""
    return ModelConfig(
        family="gpt_neox",
        vocab_size=PYTHIA_VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rope_theta=10_000.0,
        rotary_fraction=0.25,
        norm_eps=1e-5,
        initializer_range=0.02,
        initializer="normal",
    )


# 8/3 hidden, up to a multiple of 256
OLMO2_30M = olmo2(hidden_size=256, layers=4, heads=8, intermediate_size=768)
OLMO2_190M = olmo2(
    hidden_size=768, layers=12, heads=12, intermediate_size=olmo2_ladder_intermediate_size(768)
)
OLMO2_1B = olmo2(hidden_size=2048, layers=16, heads=16, intermediate_size=8192)
OLMO2_7B = olmo2(hidden_size=4096, layers=32, heads=32, intermediate_size=11008)
OLMO2_13B = olmo2(hidden_size=5120, layers=40, heads=40, intermediate_size=13824)
OLMO2_32B = olmo2(hidden_size=5120, layers=64, heads=40, intermediate_size=27648, key_value_heads=8)
PYTHIA_70M = pythia(hidden_size=512, layers=6, heads=8)
PYTHIA_160M = pythia(hidden_size=768, layers=12, heads=12)
