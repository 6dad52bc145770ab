"""The KV cache cast inside attention, against a cache of transformers that casts in loops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, MambaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.mamba.modeling_mamba import MambaBlock

from base.errors import UserError
from base.ranks import ALONE
from quant_eval.casts.attention import (
    CacheCast,
    CacheRanges,
    TokenCast,
    cast_cache,
    watch_cache,
)
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import Block
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from quant_eval.tasks.measurement import quantized_model
from quant_eval.transforms.placement import Places
from tests.quant_eval.models import ARCHITECTURES, open_model, run_settings
from train.model.families import FAMILIES, LAYERS

PLAIN = Places({})  # nothing is rotated
TOKENS = torch.randint(1, 320, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def directory(request, tiny):
    return tiny(request.param)


@pytest.fixture(scope="module")
def llama(tiny):
    return tiny("llama")


def load(directory, dtype=torch.float32):
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    return whole.eval()


def put_in(whole, directory, change):
    """Every block of a whole model replaced by a copy that `change` has changed."""
    model = open_model(directory, whole.dtype)
    layers = getattr(getattr(whole, model.family.decoder), LAYERS)
    for index in range(model.num_blocks):
        block = model.block(index).copy()
        change(block)
        layers[index] = block.module
    return whole


def context_of(directory):
    return open_model(directory).context(12)


@torch.no_grad()
def logits_of(model, **options):
    return model(TOKENS, **({"use_cache": False} | options)).logits


@torch.no_grad()
def after_first_block(model):
    return model(TOKENS, use_cache=False, output_hidden_states=True).hidden_states[1]


def hadamard_of(config):
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return deterministic_hadamard_matrix(size, torch.float64) / size**0.5


def casting(bits):
    return CacheCast(TokenCast(bits), TokenCast(bits))


def nearest(x_F, bits):
    """One head's features of one token on their own grid; numpy, fp32."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = min(x_F.min(), np.float32(0)), max(x_F.max(), np.float32(0))
    scale = (high - low) / np.float32(2**bits - 1)
    zero = np.rint(lowest - low / scale)
    codes_F = np.rint(np.clip(x_F / scale + zero, lowest, highest))
    return (codes_F - zero) * scale


def cast_in_loops(x_BHLF, bits):
    cast = x_BHLF.float().numpy().copy()
    for place in np.ndindex(cast.shape[:-1]):
        cast[place] = nearest(cast[place], bits)
    return torch.from_numpy(cast).to(x_BHLF.dtype)


class CastCache(DynamicCache):
    """transformers' cache, which keeps what it is given and hands it out cast."""

    def __init__(self, cast):
        super().__init__()
        self.cast = cast

    def update(self, *given, **options):
        keys, values = super().update(*given, **options)
        return self.cast(keys), self.cast(values)


def test_logits_are_those_of_a_cache_that_casts_token_by_token(directory):
    """In a padded batch as lm-eval makes them, and then two tokens more, one at a time."""
    bits, whole, spec = 3, load(directory), parse_spec("kv3")
    mask, changed = PADDED, load(directory)
    caches: list[Any] = [CastCache(lambda x: cast_in_loops(x, bits)), DynamicCache()]
    models = [whole, put_in(changed, directory, lambda block: cast_cache(block, spec, PLAIN))]
    plain = logits_of(whole, attention_mask=mask)
    for step in range(3):
        tokens = TOKENS if step == 0 else TOKENS[:, step : step + 1]
        with torch.no_grad():
            expected, got = (
                model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits
                for model, cache in zip(models, caches, strict=True)
            )
        assert torch.equal(got, expected)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        if step == 0:
            assert (got - plain).abs().max() > 1e-3 * plain.abs().max()
    for own, other in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.equal(own.keys, other.keys)  # not cast: that is done where they are read
        assert own.keys[0, 0].unique().numel() > 2**bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_width_is_the_loop_over_tokens_and_heads(bits, dtype):
    generator = torch.Generator().manual_seed(bits)
    x_BHLF = torch.randn(2, 3, 9, 16, generator=generator).mul(3).to(dtype)
    x_BHLF[0, 0, 0], x_BHLF[0, 0, 1] = 1.5, -0.25  # on one side of 0, which is a point too
    cast = casting(bits)
    keys, values = cast(x_BHLF, 2 * x_BHLF)
    assert keys.dtype == dtype
    assert torch.equal(keys, cast_in_loops(x_BHLF, bits))
    assert torch.equal(values, cast_in_loops(2 * x_BHLF, bits))
    x_BHLF[1, 1, 1] = 0
    assert not cast(x_BHLF, x_BHLF)[0][1, 1, 1].any()
    x_BHLF[1, 1, 1, 3] = torch.nan
    assert cast(x_BHLF, x_BHLF)[0][1, 1, 1].isnan().any()


def test_rounded_is_what_quarot_rounds(directory):
    """QuaRot's own way: queries and keys rotated after rope, values rotated, the output back.

    After the first block: in later ones a key may differ in its last bit and be rounded elsewhere.
    """
    whole, spec = load(directory), parse_spec("kv3-quarot")
    rotation_FF = hadamard_of(whole.config).roll(1, 0)  # unlike its transpose
    places = Places({}, head_rotation=rotation_FF)

    def attend(module, queries, keys, values, mask, **options):
        matrix_FF = rotation_FF.float()
        queries, keys, values = (x @ matrix_FF for x in (queries, keys, values))
        keys, values = cast_in_loops(keys, 3), cast_in_loops(values, 3)
        attended, _ = sdpa_attention_forward(module, queries, keys, values, mask, **options)
        return attended @ matrix_FF.T, None

    put_in(whole, directory, lambda block: cast_cache(block, spec, places))
    got = after_first_block(whole)
    AttentionInterface.register("quarot-witness", attend)
    whole = load(directory)
    plain = after_first_block(whole)
    # of a name that transformers knows no mask for, it is sdpa's
    AttentionMaskInterface.register("quarot-witness", sdpa_mask)
    whole.config._attn_implementation = "quarot-witness"
    expected = after_first_block(whole)
    assert (expected - plain).abs().max() > 1e-3 * expected.abs().max()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_fp8_is_the_cache_of_compressed_tensors_with_the_scales_of_the_text(directory):
    """Bit for bit where that finds the cache; it does not in gpt_neox."""
    spec, scales = parse_spec("kvfp8"), dict[str, dict[str, torch.Tensor]]()

    def change(block):
        seen = watch_cache(block, PLAIN)
        model = open_model(directory)
        for half in (TOKENS[:1], TOKENS[1:]):
            x_BLD, context = model.embedding()(half), model.context(half.shape[1])
            block.attended(x_BLD, context)
        cache = cast_cache(block, spec, PLAIN, seen)
        scales[f"{block.prefix}.{block.family.attention}"] = cache.scales()

    whole = put_in(load(directory), directory, change)
    got = logits_of(whole)
    peer = load(directory)
    cached: Any = DynamicCache()
    logits_of(peer, past_key_values=cached, use_cache=True)
    first = cached.layers[0]
    largest = torch.stack([first.keys.abs().max(), first.values.abs().max()])
    of_first = next(iter(scales.values()))
    torch.testing.assert_close(torch.cat([*of_first.values()]), largest / 448)
    scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    config = QuantizationConfig(
        config_groups={}, kv_cache_scheme=scheme, quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(peer, config)
    for name, own in scales.items():
        attention = peer.get_submodule(name)
        if not hasattr(attention, "kv_cache"):
            assert peer.config.model_type == "gpt_neox"
            return
        for key, scale in own.items():
            attention.get_parameter(key).data = scale
    assert torch.equal(got, logits_of(peer))


def test_the_block_that_was_copied_stays(llama):
    model = open_model(llama)
    block, context = model.block(0), model.context(12)
    x_BLD = model.embedding()(TOKENS)
    before = block(x_BLD, context)
    copied = block.copy()
    cache = cast_cache(copied, parse_spec("kv2"), PLAIN)
    with pytest.raises(UserError, match="scales of an FP8 cache alone; give kvfp8"):
        cache.scales()
    assert not torch.equal(copied(x_BLD, context), before)
    assert torch.equal(block(x_BLD, context), before)
    assert torch.equal(model.block(0)(x_BLD, context), before)
    assert torch.equal(copied.copy()(x_BLD, context), copied(x_BLD, context))


def test_one_block_of_a_whole_model_is_cast_alone(llama):
    """transformers gives all blocks one config, which names the attention function."""
    whole = load(llama)
    block = Block(whole.model.layers[1], "model.layers.1", FAMILIES["llama"], False)
    cast_cache(block, parse_spec("kv3"), PLAIN)
    with torch.no_grad():
        states, plain = (
            model(TOKENS, use_cache=False, output_hidden_states=True).hidden_states
            for model in (whole, load(llama))
        )
    assert torch.equal(states[1], plain[1])
    assert not torch.equal(states[2], plain[2])
    assert torch.equal(states[2], block(states[1], context_of(llama)))


def test_a_block_without_a_cache_is_refused():
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4)
    family = replace(
        FAMILIES["llama"], attention="mixer", attention_norm="norm", mlp="mixer", mlp_norm="norm"
    )
    block = Block(MambaBlock(config, 0), "backbone.layers.0", family, False)
    with pytest.raises(UserError, match="MambaMixer keeps no keys and values; leave -kv out"):
        cast_cache(block, parse_spec("kv4"), PLAIN)


@pytest.mark.parametrize("largest", [0.0, float("nan"), float("inf")])
def test_a_text_that_gives_no_scale_is_refused(llama, largest):
    block = open_model(llama).block(1)
    ranges = CacheRanges()
    ranges(torch.ones(1, 1, 1, 2), torch.tensor([[[[largest, 0.0]]]]))
    with pytest.raises(UserError, match=r"model\.layers\.1: its values are at most .*; check"):
        cast_cache(block, parse_spec("kvfp8"), PLAIN, ranges)


def test_scales_are_those_of_the_quantized_models_own_keys_on_the_calibration_text(llama):
    """The walk's, against what transformers' cache holds of the finished model on that text."""
    ids_NL = torch.randint(1, 320, (10, 24), generator=torch.Generator().manual_seed(3))
    whole, scales = load(llama), list[torch.Tensor]()

    def finished(index, block):
        whole.model.layers[index] = block.module
        scales.append(torch.cat([*block.attention.cache_cast.scales().values()]))

    model = open_model(llama)
    variant = Variant(parse_spec("gptq-b3-g16-kvfp8"), ids_NL, finished=finished)
    walk(model, [variant], None, ComputeSettings(batch_size=4), ALONE)
    cache: Any = DynamicCache()
    with torch.no_grad():
        whole(ids_NL, past_key_values=cache, use_cache=True)
    for layer, own_2 in zip(cache.layers, scales, strict=True):
        largest_2 = torch.stack([layer.keys.abs().max(), layer.values.abs().max()])
        torch.testing.assert_close(own_2, largest_2 / 448, rtol=1e-5, atol=0)


def test_tasks_are_asked_of_a_model_that_reads_its_cache_cast(llama):
    spec, nowhere = parse_spec("kv3"), Path("not read")
    asked = quantized_model(llama, spec, run_settings(nowhere, nowhere), ())[0]
    options = {"attention_mask": PADDED, "use_cache": True}
    cache = CastCache(lambda x: cast_in_loops(x, 3))
    expected = logits_of(load(llama), past_key_values=cache, **options)
    assert torch.equal(logits_of(asked, **options), expected)
