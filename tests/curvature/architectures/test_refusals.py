"""Models that the dual layers do not cover are refused by name."""

import pytest
from transformers import AutoConfig

from base.errors import UserError
from curvature.dual.blocks import curved_family
from tests.curvature.architectures.variants import PARTIAL

# which transformers' Mistral does not read
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}
NO_SIZE = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}
CHUNKED = {"layer_types": ["chunked_attention"], "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("granite", {}, "architecture granite is not known; give one of olmo2, "),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act silu, this model has gelu"),
        ("olmo2", {"is_causal": False}, "is_causal True, this model has False"),
        ("llama", {"hidden_act": "relu"}, "hidden_act silu, this model has relu"),
        ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor 1.0, this model has 0.5"),
        ("llama", {"sliding_window": 4}, "llama with sliding_attention is not supported"),
        ("llama", CHUNKED, "llama with chunked_attention is not supported"),
        ("qwen3", CHUNKED, "qwen3 with chunked_attention is not supported"),
        ("mistral", MIXED, "mistral with full_attention is not supported"),
        ("smollm3", NO_SIZE, "layers of sliding_attention but no sliding_window"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": PARTIAL}},
            "partial_rotary_factor 1.0, this model has 0.5",
        ),
        ("apertus", {"hidden_act": "relu2"}, "hidden_act xielu, this model has relu2"),
        ("gpt_neox", {"hidden_act": "gelu_fast"}, "hidden_act gelu, this model has gelu_fast"),
    ],
)
def test_refused_in_one_line(model_type, settings, named):
    with pytest.raises(UserError, match=named) as refused:
        curved_family(AutoConfig.for_model(model_type, **settings))
    assert "\n" not in str(refused.value)
