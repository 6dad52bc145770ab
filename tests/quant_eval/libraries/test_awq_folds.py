"""Every fold of every architecture leaves the unquantized model as it was; folds known to be
wrong are refused.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from base.errors import UserError
from quant_eval.libraries.awq_mappings import (
    Fold,
    Mappings,
    apply_fold,
    check_folds,
    check_scaled,
    mappings_for,
    witness,
)
from quant_eval.libraries.outcome import block_linears

GROUPED = {"num_key_value_heads": 2}  # two query heads share each value head
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "olmo2": (Olmo2Config, {}),
    "olmo2-grouped": (Olmo2Config, GROUPED),
    "olmo": (OlmoConfig, {}),
    "olmo-clip": (OlmoConfig, {"clip_qkv": 0.5}),
    "llama": (LlamaConfig, BIASES),
    "llama-grouped": (LlamaConfig, GROUPED | {"tie_word_embeddings": True, "pad_token_id": 300}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "gpt_neox-serial": (GPTNeoXConfig, {"use_parallel_residual": False}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, "num_key_value_heads": 4}),
    "smollm3-grouped": (SmolLM3Config, GROUPED),
    "mistral": (MistralConfig, {"num_key_value_heads": 4, "sliding_window": None}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 4}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 4}),
    "apertus": (ApertusConfig, {"num_key_value_heads": 4}),
    "apertus-grouped": (ApertusConfig, GROUPED),
}
NUM_LAYERS = 3


def make_model(name):
    """A random model in fp32 whose norms and biases are not identities, so that a fold through
    them shows.
    """
    kind, changes = MODELS[name]
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
    }
    shape |= {
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    shape |= {"eos_token_id": 0, "tie_word_embeddings": False}
    if kind is ApertusConfig:  # its default is for longer contexts
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        kind(**(shape | changes)), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            elif "act_fn" not in parameter_name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_fold_is_exact(name):
    model = make_model(name)
    mappings = mappings_for(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_folds(model, mappings, seed=1)
    check_folds(witness(model), mappings, seed=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_all_folds_together_change_weights_and_not_logits(name):
    model = make_model(name).double()
    mappings = mappings_for(model)
    tokens_BL = torch.arange(40).reshape(2, 20) * 7
    folded = copy.deepcopy(model)
    for block in folded.get_submodule(mappings.blocks).children():
        for fold in mappings.folds:
            columns = block.get_submodule(fold.balance[0]).weight.shape[1]
            apply_fold(block, fold, torch.linspace(0.1, 9, columns, dtype=torch.float64))
    changed = {
        key
        for key, value in folded.state_dict().items()
        if not torch.equal(value, model.state_dict()[key])
    }
    balanced = {
        f"{mappings.blocks}.{i}.{name}.weight"
        for i in range(3)
        for fold in mappings.folds
        for name in fold.balance
    }
    assert balanced <= changed
    with torch.no_grad():
        expected_BLV, logits_BLV = (
            network(input_ids=tokens_BL).logits for network in (model, folded)
        )
    # RMSNorm and softmax compute in fp32 inside the float64 model
    torch.testing.assert_close(
        logits_BLV, expected_BLV, rtol=0, atol=1e-5 * float(expected_BLV.abs().max())
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_table_accounts_for_every_linear_of_the_blocks(name):
    model = make_model(name)
    mappings = mappings_for(model)
    linears = [
        key
        for key, part in model.named_modules()
        if isinstance(part, nn.Linear) and key != "lm_head"
    ]
    assert sorted(block_linears(model)) == sorted(linears)
    names = [linear for fold in mappings.folds for linear in fold.balance] + list(mappings.unscaled)
    blocks = [f"{mappings.blocks}.{i}" for i in range(NUM_LAYERS)]
    assert sorted(f"{block}.{name}" for block in blocks for name in names) == sorted(linears)


WRONG = {
    "norm after the attention, olmo2": (
        "olmo2",
        "post_attention_layernorm",
        ["mlp.gate_proj", "mlp.up_proj"],
    ),
    "norm after the mlp, olmo2": (
        "olmo2",
        "post_feedforward_layernorm",
        ["mlp.gate_proj", "mlp.up_proj"],
    ),
    "keys instead of values": ("olmo2", "self_attn.k_proj", ["self_attn.o_proj"]),
    "gate instead of up": ("llama", "mlp.gate_proj", ["mlp.down_proj"]),
    "one reader of a norm left out": (
        "llama",
        "input_layernorm",
        ["self_attn.q_proj", "self_attn.k_proj"],
    ),
    "grouped values": ("llama-grouped", "self_attn.v_proj", ["self_attn.o_proj"]),
    "norm without parameters": (
        "olmo",
        "input_layernorm",
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ),
    "clipped values": ("olmo-clip", "self_attn.v_proj", ["self_attn.o_proj"]),
    "through GELU": ("gpt_neox", "mlp.dense_h_to_4h", ["mlp.dense_4h_to_h"]),
    "fused values": ("gpt_neox", "attention.query_key_value", ["attention.dense"]),
    "through xIELU": ("apertus", "mlp.up_proj", ["mlp.down_proj"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folds_are_refused(case):
    name, smooth, balance = WRONG[case]
    model = make_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wrong = Mappings(mappings_for(model).blocks, (Fold(smooth, tuple(balance)),), {})
    for network in (model, witness(model)):
        with pytest.raises(
            UserError, match=rf"^AWQ mapping {smooth} -> .*; remove (it|the mapping)"
        ):
            check_folds(network, wrong, seed=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "olmo2"])
def test_a_weight_that_is_not_the_original_times_its_scales_is_refused(name, dtype):
    original = make_model(name).to(dtype)
    mappings = mappings_for(original)
    scaled, scales = copy.deepcopy(original), {}
    generator = torch.Generator().manual_seed(0)
    for index, block in enumerate(scaled.get_submodule(mappings.blocks).children()):
        for fold in mappings.folds:
            columns = block.get_submodule(fold.balance[0]).weight.shape[1]
            scales[f"{mappings.blocks}.{index}.{fold.smooth}"] = (
                torch.rand(columns, generator=generator) * 4 + 0.1
            )
            apply_fold(block, fold, scales[f"{mappings.blocks}.{index}.{fold.smooth}"])
    check_scaled(scaled, original, mappings, scales)
    folded = f"{mappings.blocks}.1.{mappings.folds[0].smooth}.weight"
    elsewhere = next(key for key, _ in scaled.named_parameters() if "emb" in key)
    for key, factor in ((folded, 1.03), (elsewhere, 1 + 2 * torch.finfo(dtype).eps)):
        wrong = copy.deepcopy(scaled)
        with torch.no_grad():
            wrong.get_parameter(key).view(-1)[-1] *= factor
        with pytest.raises(UserError, match=f"^{key} is not the original times its AWQ scales"):
            check_scaled(wrong, original, mappings, scales)
    wrong_scales = scales | {
        folded.removesuffix(".weight"): scales[folded.removesuffix(".weight")] * 1.03
    }
    with pytest.raises(UserError, match="is not the original times its AWQ scales"):
        check_scaled(scaled, original, mappings, wrong_scales)


@pytest.mark.parametrize(
    "name", ["olmo2-grouped", "llama-grouped", "smollm3-grouped", "apertus-grouped"]
)
def test_grouped_values_are_left_out_with_a_reason(name):
    mappings = mappings_for(make_model(name))
    assert "self_attn.v_proj" not in [fold.smooth for fold in mappings.folds]
    assert "4 query heads share the values of 2" in mappings.unscaled["self_attn.o_proj"]


def test_a_model_that_is_not_finite_is_refused():
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="logits are not finite; check the checkpoint's weights"):
        check_folds(witness(model), mappings_for(model), seed=0)
