"""The cost of quantizing against operations that torch counts, and what GPUs took."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from quant_eval.cost import (
    BF16_SHARE,
    Shape,
    block_seconds,
    forward_seconds,
    quantizing_seconds,
)
from quant_eval.specs import parse_spec
from train.model.config import hf_settings
from train.model.presets import OLMO2_1B, OLMO2_7B
from train.planning.flops import GPUS

SMALL = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 96},
    "gpt_neox": {"intermediate_size": 256, "num_key_value_heads": 4},
}


def config_of(model):
    return AutoConfig.for_model(model.family, **hf_settings(model, 4096, 0))


@pytest.mark.parametrize("family", SMALL)
def test_a_forward_pass_costs_what_torch_counts(family):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, vocab_size=320, **sizes, **SMALL[family])
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    sequences, length = 4, 32
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(sequences, length, dtype=torch.int64))

    shape, tokens = Shape.of(config), sequences * length
    seconds = forward_seconds(shape, tokens, length, GPUS["h100"], "bf16")
    # Eager attention computes the whole square, of which the roofline counts half.
    half = 2 * tokens * config.num_hidden_layers * shape.attention * length
    flops = seconds * BF16_SHARE * GPUS["h100"].peak_flops + half
    # Rotary embeddings are an outer product that torch counts, too: of one head, per token.
    assert counter.get_total_flops() == pytest.approx(flops, rel=2e-3)


def test_the_shape_of_the_7b_by_hand():
    shape = Shape.of(config_of(OLMO2_7B))
    assert shape.weights == 4 * 4096**2 + 3 * 4096 * 11008
    assert shape.inputs == (4096, 4096, 4096, 11008)
    assert (shape.layers, shape.attention, shape.head) == (32, 4096, 100_352 * 4096)


@pytest.mark.parametrize(("gpu", "took"), [("h200", 1.8), ("h100", 2.1)])
def test_gptq_of_a_block_is_within_the_measured(gpu, took):
    """docs/guides/one-gpu.md: a block of OLMo2-1B in fp32, on 128 sequences of 2,048 tokens."""
    least = block_seconds(Shape.of(config_of(OLMO2_1B)), 128 * 2048, GPUS[gpu], "fp32")
    assert least < took < 1.5 * least


def test_what_is_learned_or_searched_costs_more_and_what_reads_no_text_nothing():
    shape = Shape.of(config_of(OLMO2_1B))

    def seconds(spec):
        return quantizing_seconds(shape, parse_spec(spec), 256, 2048, GPUS["h100"], "bf16")

    assert seconds("rtn-b4-g128") == 0
    assert seconds("gptq-b4-g128") < seconds("autoround-b4-g128") < seconds("awq-b4-g128")
    flatquant = "w4a4-g128-flatquant-blockwise"
    more = seconds(flatquant) - seconds("gptq-b4-g128")
    # 100 steps on all of the text, each a forward and a backward pass of twice its cost
    passes = more / shape.layers * BF16_SHARE * GPUS["h100"].peak_flops
    assert passes == pytest.approx(100 * 3 * 2 * 256 * 2048 * shape.weights)
