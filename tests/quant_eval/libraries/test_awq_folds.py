"""Every fold of every architecture leaves the unquantized model as it was; folds known to be
wrong are refused.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

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
from tests.quant_eval.models import random_model

GROUPED = {"num_key_value_heads": 2}  # two query heads share each value head
APART = {"num_key_value_heads": 4}
# architectures of `models`, and what is changed
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {}),
    "olmo2-grouped": ("olmo2", GROUPED),
    "olmo": ("olmo", {"clip_qkv": None}),
    "olmo-clip": ("olmo", {}),
    "llama": ("llama", APART),
    "llama-grouped": ("llama-tied", GROUPED | {"pad_token_id": 300}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-serial": ("gpt_neox-sequential", {}),
    "smollm3": ("smollm3", APART),
    "smollm3-grouped": ("smollm3", GROUPED),
    "mistral": ("mistral", APART),
    "qwen2": ("qwen2", APART),
    "qwen3": ("qwen3", APART),
    "apertus": ("apertus", APART),
    "apertus-grouped": ("apertus", GROUPED),
}


def make_model(name):
    """A model in fp32 whose norms and biases are not identities, so that a fold through them
    shows.
    """
    architecture, changes = MODELS[name]
    return random_model(architecture, **changes).eval()


@pytest.mark.parametrize("name", MODELS)
def test_every_fold_is_exact(name):
    model = make_model(name)
    mappings = mappings_for(model)
    before = copy.deepcopy(model).state_dict()
    check_folds(model, mappings, seed=1)
    check_folds(witness(model), mappings, seed=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def blocks_of(model):
    return model.get_submodule(mappings_for(model).blocks)


@pytest.mark.parametrize("name", MODELS)
def test_all_folds_together_change_weights_and_not_logits(name):
    model = make_model(name).double()
    mappings = mappings_for(model)
    tokens_BL = torch.arange(40).reshape(2, 20) * 7
    folded = copy.deepcopy(model)
    for block in blocks_of(folded):
        for fold in mappings.folds:
            columns = block.get_submodule(fold.balance[0]).weight.shape[1]
            apply_fold(block, fold, torch.linspace(0.1, 9, columns, dtype=torch.float64))
    for key in (f"{name}.weight" for fold in mappings.folds for name in fold.balance):
        for block, other in zip(blocks_of(folded), blocks_of(model), strict=True):
            assert not torch.equal(block.get_parameter(key), other.get_parameter(key))
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
    linears = sorted(
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not model.get_output_embeddings()
    )
    assert sorted(block_linears(model)) == linears
    names = [linear for fold in mappings.folds for linear in fold.balance] + list(mappings.unscaled)
    blocks = [f"{mappings.blocks}.{index}" for index in range(len(blocks_of(model)))]
    assert sorted(f"{block}.{name}" for block in blocks for name in names) == linears


MLP_READERS = ("mlp.gate_proj", "mlp.up_proj")
READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WRONG = {
    "norm after the attention": ("olmo2", "post_attention_layernorm", MLP_READERS),
    "norm after the mlp": ("olmo2", "post_feedforward_layernorm", MLP_READERS),
    "keys instead of values": ("olmo2", "self_attn.k_proj", ("self_attn.o_proj",)),
    "gate instead of up": ("llama", "mlp.gate_proj", ("mlp.down_proj",)),
    "one reader of a norm left out": ("llama", "input_layernorm", READERS[:2]),
    "grouped values": ("llama-grouped", "self_attn.v_proj", ("self_attn.o_proj",)),
    "norm without parameters": ("olmo", "input_layernorm", READERS),
    "clipped values": ("olmo-clip", "self_attn.v_proj", ("self_attn.o_proj",)),
    "through GELU": ("gpt_neox", "mlp.dense_h_to_4h", ("mlp.dense_4h_to_h",)),
    "fused values": ("gpt_neox", "attention.query_key_value", ("attention.dense",)),
    "through xIELU": ("apertus", "mlp.up_proj", ("mlp.down_proj",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folds_are_refused(case):
    name, smooth, balance = WRONG[case]
    model = make_model(name)
    before = copy.deepcopy(model).state_dict()
    wrong = Mappings(mappings_for(model).blocks, (Fold(smooth, balance),), {})
    words = rf"^AWQ mapping {smooth} -> .*; remove (it|the mapping)"
    for network in (model, witness(model)):
        with pytest.raises(UserError, match=words):
            check_folds(network, wrong, seed=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "olmo2"])
def test_a_weight_that_is_not_the_original_times_its_scales_is_refused(name, dtype):
    original = make_model(name).to(dtype)
    mappings = mappings_for(original)
    scaled, scales = copy.deepcopy(original), {}
    generator = torch.Generator().manual_seed(0)
    for index, block in enumerate(blocks_of(scaled)):
        for fold in mappings.folds:
            columns = block.get_submodule(fold.balance[0]).weight.shape[1]
            scales_I = torch.rand(columns, generator=generator) * 4 + 0.1
            apply_fold(block, fold, scales_I)
            scales[f"{mappings.blocks}.{index}.{fold.smooth}"] = scales_I
    check_scaled(scaled, original, mappings, scales)
    smooth = f"{mappings.blocks}.1.{mappings.folds[0].smooth}"
    elsewhere = next(key for key, _ in scaled.named_parameters() if "emb" in key)
    for key, factor in ((f"{smooth}.weight", 1.03), (elsewhere, 1 + 2 * torch.finfo(dtype).eps)):
        wrong = copy.deepcopy(scaled)
        with torch.no_grad():
            wrong.get_parameter(key).view(-1)[-1] *= factor
        with pytest.raises(UserError, match=f"^{key} is not the original times its AWQ scales"):
            check_scaled(wrong, original, mappings, scales)
    wrong_scales = scales | {smooth: scales[smooth] * 1.03}
    with pytest.raises(UserError, match="is not the original times its AWQ scales"):
        check_scaled(scaled, original, mappings, wrong_scales)


def test_a_model_that_is_not_finite_is_refused():
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="logits are not finite; check the checkpoint's weights"):
        check_folds(witness(model), mappings_for(model), seed=0)
