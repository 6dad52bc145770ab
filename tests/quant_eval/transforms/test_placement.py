"""Places against weights that really are fused, and what no architecture allows."""

import copy
import re

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from torch import nn
from transformers import AutoConfig

from base.errors import UserError
from quant_eval.sizes import site_widths
from quant_eval.specs import parse_spec
from quant_eval.transforms.fitting import fit_transform
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.placement import places_of
from quant_eval.transforms.steps import Transform
from tests.quant_eval.models import ARCHITECTURES
from tests.quant_eval.transforms.linears import (
    blocks,
    difference,
    inputs_of,
    load,
    logits,
    transformed,
)
from train.model.families import FAMILIES, SITES, family_of

FUSED = "w4a4-g8-quarot-fused"
HIDDEN, HEAD, FFN = 32, 8, 64


def places_on(directory, name):
    config = AutoConfig.from_pretrained(directory)
    return places_of(parse_spec(name), family_of(config), config)


def per_head(count):
    matrix = torch.from_numpy(sylvester(HEAD)).double() / HEAD**0.5
    return torch.block_diag(*matrix.expand(count, HEAD, HEAD))


@torch.no_grad()
def fuse(model, rotation_II):
    """Rewrite all weights of a Llama: the residual stream becomes x Q, values v R."""
    model = copy.deepcopy(model)
    body, config = model.model, model.config
    multiply(body.embed_tokens, rotation_II)
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers = {
            layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        for norm, linears in readers.items():
            fold(norm, linears)
            for linear in linears:
                multiply(linear, rotation_II)
        rotate_outputs(attention.v_proj, per_head(config.num_key_value_heads))
        multiply(attention.o_proj, per_head(config.num_attention_heads))
        rotate_outputs(attention.o_proj, rotation_II)
        rotate_outputs(mlp.down_proj, rotation_II)
    fold(body.norm, (model.lm_head,))
    multiply(model.lm_head, rotation_II)
    return model


def multiply(module, matrix_II):
    module.weight.copy_(module.weight.double() @ matrix_II)


def fold(norm, linears):
    for linear in linears:
        linear.weight.copy_(linear.weight.double() * norm.weight.double())
    norm.weight.fill_(1)


def rotate_outputs(linear, matrix_OO):
    linear.weight.copy_(matrix_OO.T @ linear.weight.double())
    if linear.bias is not None:
        linear.bias.copy_(linear.bias.double() @ matrix_OO)


def test_fused_llama_has_the_weights_that_the_places_say(tiny):
    """Also its logits, so Q really passes all norms of Llama when their gains are folded."""
    model = load(tiny("llama"))
    rotation_II = places_on(tiny("llama"), FUSED).output("o_proj").weight(eye(HIDDEN))
    assert float((rotation_II @ rotation_II.T - torch.eye(HIDDEN)).abs().max()) < 1e-12
    fused = fuse(model, rotation_II)
    assert difference(fused, logits(model)) < 1e-5
    ours = transformed(model, inputs_of(model), parse_spec(FUSED))
    before_down_II = torch.from_numpy(sylvester(FFN)).double() / FFN**0.5
    compared = 0
    for name, linear in fused.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            weight_OI = linear.weight.double()
            if name.endswith("down_proj"):
                weight_OI = weight_OI @ before_down_II  # R4 is online: no other weight takes it up
            own_OI = ours.get_submodule(name).weight.double()
            torch.testing.assert_close(own_OI, weight_OI, rtol=0, atol=1e-6)
            compared += 1
    assert compared == 3 * 7


@torch.no_grad()
def with_rotated_values(model, places):
    """Rewrite the weights and biases of the values, and those that read them: nothing online."""
    for block in blocks(model):
        name, values = list(block.linears()[0].items())[-1]
        rotate_outputs(values, places.output(name).weight(eye(values.out_features)))
        (out,) = block.linears()[1].values()
        place = places.sites["attention_out"]
        multiply(out, Transform(*hadamard_steps(place.width, place.block)).weight(eye(place.width)))


def eye(width):
    return torch.eye(width, dtype=torch.float64)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rotation_of_values_needs_nothing_online(tiny, name):
    """Under GQA, with biases, and in a linear packed by heads; clipped values do not pass it."""
    model = load(tiny(name))
    reference, clips = logits(model), name == "olmo"
    config = AutoConfig.from_pretrained(tiny(name))
    config.clip_qkv = None
    places = places_of(parse_spec("w4a4-g8-quarot"), family_of(config), config)
    # queries and keys pass rope and norms, which rotations do not
    assert places.outputs.keys() == {family_of(config).reading[-1]}
    with_rotated_values(model, places)
    assert difference(model, reference) > 1e-3 if clips else difference(model, reference) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_widths_and_norms_are_those_of_the_modules(tiny, name):
    model = load(tiny(name))
    family = family_of(model.config)
    groups = zip(SITES, blocks(model)[0].linears(), strict=True)
    widths = {site: linear.in_features for site, group in groups for linear in group.values()}
    assert site_widths(model.config) == widths
    norm = getattr(getattr(model, family.decoder).layers[0], family.attention_norm)
    constant = torch.full((1, HIDDEN), 3.0)  # of which a norm that subtracts the mean makes 0
    changes = norm(constant) - norm(0 * constant)  # a bias is not part of it
    assert family.centers == (float(changes.detach().abs().max()) < 1e-3)


def test_every_family_is_tried():
    assert {model_type for model_type, _ in ARCHITECTURES.values()} == set(FAMILIES)


def test_cache_rotation_is_of_a_head_and_only_with_a_cast_cache(tiny):
    directory = tiny("qwen3")
    head_16 = torch.from_numpy(sylvester(16)).double() / 4
    for name in ("kv4-quarot", "w4a4-g8-kv4-quarot"):
        torch.testing.assert_close(places_on(directory, name).head_rotation, head_16)
    assert places_on(directory, "w4a4-g8-quarot").head_rotation is None
    # a cache alone: no linear changes
    places = places_on(directory, "kv4-quarot")
    assert places.output("model.layers.0.self_attn.v_proj") is None
    weight_OI = torch.zeros(1, HIDDEN)
    for site in places.sites:
        assert not fit_transform(parse_spec("kv4-quarot"), site, places, weight_OI, 0).steps


def test_scales_between_values_and_their_output_leave_r2_online(tiny):
    places = places_on(tiny("llama"), "w4a4-g8-smooth0.5-quarot")
    assert places.output("model.layers.0.self_attn.v_proj") is None
    assert places.sites["attention_out"].block == HEAD


@pytest.mark.parametrize(
    ("ffn", "spec", "reason"),
    [
        (90, "w4a4-perchannel-quarot", "no Hadamard matrix of size 90 is known, for the 90 inputs"),
        (FFN, "rtn-b4-g8-had48", "blocks of 48 do not divide the 32 inputs of attention_in; "),
        (96, "rtn-b4-g8-duquant64", "blocks of 64 do not divide the 32 inputs of attention_in; "),
        (144, "rtn-b4-g8-duquant", "blocks of 128 do not divide the 144 inputs of mlp_out; "),
        (7, "rtn-b4-perchannel-had", "size 7 is known, for the 7 inputs of mlp_out; leave the rot"),
        (88_080, "rtn-b4-perchannel-rhad", "size 88080 is known, for the 88080 inputs of mlp_out"),
    ],
)
def test_widths_are_refused_with_a_block_that_works(tiny, ffn, spec, reason):
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.update({"intermediate_size": ffn})
    with pytest.raises(UserError) as caught:
        places_of(parse_spec(spec), family_of(config), config)
    assert reason in str(caught.value)
    advised = re.search(r"such as -(had\d+|duquant\d+)$", str(caught.value))
    assert bool(advised) == ("leave the rotation out" not in str(caught.value))
    if advised:
        places_of(parse_spec(f"rtn-b4-perchannel-{advised[1]}"), family_of(config), config)
