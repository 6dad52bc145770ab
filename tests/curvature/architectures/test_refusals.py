"""Models that the dual layers do not cover are refused by name."""

import pytest
from transformers import AutoConfig

from base.errors import UserError
from curvature.architectures import architecture_of
from tests.curvature.architectures.variants import PARTIAL


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0}, "this model is granite"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act silu, this model has gelu"),
        ("olmo2", {"is_causal": False}, "is_causal True, this model has False"),
        ("llama", {"hidden_act": "relu"}, "hidden_act silu, this model has relu"),
        ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor 1.0, this model has 0.5"),
        ("mistral", {"sliding_window": 4}, "sliding_window None, this model has 4"),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 1,
                "num_hidden_layers": 2,
            },
            "layer_types full_attention, this model has sliding_attention",
        ),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"], "num_hidden_layers": 1},
            "this model has chunked_attention",
        ),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 4},
            "this model has sliding_attention",
        ),
        ("apertus", {"hidden_act": "relu2"}, "hidden_act xielu, this model has relu2"),
        ("gpt_neox", {"hidden_act": "gelu_fast"}, "hidden_act gelu, this model has gelu_fast"),
    ],
)
def test_refused_in_one_line(model_type, settings, named):
    with pytest.raises(UserError, match=named) as refused:
        architecture_of(AutoConfig.for_model(model_type, **settings))
    assert "curvature knows" in str(refused.value)
    assert "\n" not in str(refused.value)
