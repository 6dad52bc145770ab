"""The KV cache in few bits, where attention reads it.

A cache holds the values, and the keys as they are after rope. An attention function that
transformers looks up in the attention module's config casts both and hands them to sdpa: one
function for every architecture. transformers' own cache, where generation uses one, keeps full
precision, so that a token is cast from its own numbers whenever it is read, and never twice. No
token is exempt: queries see their own token's key and value cast too.

Shapes: B sequences, H heads of keys and values, L tokens, F features of a head.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from base.errors import UserError
from quant_eval.casts.activations import check_largest
from quant_eval.model.streamed import Block
from quant_eval.quantizer import QuantSpec
from quant_eval.transforms.placement import Places

FUNCTION = "quantdyn-kv"  # as transformers knows it


def watch_cache(block: Block, places: Places) -> "CacheRanges":
    """Let a block record what a cache would hold, for `cast_cache` with scales of the tensor.

    Its output stays as it is.
    """
    ranges = CacheRanges(places.head_rotation)
    attach(block, ranges)
    return ranges


def cast_cache(
    block: Block, spec: QuantSpec, places: Places, ranges: "CacheRanges | None" = None
) -> "CacheCast":
    """Cast keys and values of a block's attention in place.

    Args:
        block: a copy, which may be quantized; what it was copied from stays as it is.
        spec: its `kv` says to which numbers.
        places: their head rotation is that of keys, R3, and values, R2 (arXiv:2404.00456).
        ranges: for `kvfp8`, of the calibration text with the same places, reduced over the ranks.

    Raises:
        UserError: the block keeps no keys and values, or they are 0 or not finite on all of the
            calibration text.
    """
    assert spec.kv is not None
    keys: nn.Module
    values: nn.Module
    if spec.kv == "fp8":
        assert ranges is not None
        keys = ScaledCast(ranges.largest_2[0], f"{block.prefix}: its keys")
        values = ScaledCast(ranges.largest_2[1], f"{block.prefix}: its values")
    else:
        keys = values = TokenCast(int(spec.kv.removeprefix("int")))
    cache = CacheCast(keys, values, places.head_rotation)
    attach(block, cache)
    return cache


class TokenCast(nn.Module):
    """Integers with a scale and a zero point for each token and head.

    From min(x, 0) to max(x, 0) of a head's features: QuaRot's (arXiv:2404.00456) without its
    clipping to 0.95 of the range. KIVI (arXiv:2402.02750) shares scales of keys over tokens.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

        self._args = QuantizationArgs(
            num_bits=bits, symmetric=False, strategy=QuantizationStrategy.TOKEN, dynamic=True
        )

    def forward(self, x_BHLF: Tensor) -> Tensor:
        """Cast fp32 [..., F] and back."""
        from compressed_tensors.quantization import fake_quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        low, high = x_BHLF.amin(-1, keepdim=True), x_BHLF.amax(-1, keepdim=True)
        scales, zeros = calculate_qparams(low, high, self._args)
        cast_BHLF: Tensor = fake_quantize(x_BHLF, scales, zeros, self._args)
        return cast_BHLF


class ScaledCast(nn.Module):
    """E4M3 with one scale for all, as vLLM's fp8 cache has it.

    Larger values saturate.

    Attributes:
        scale: fp32 [1], the largest |x| of the calibration text / 448.
    """

    scale: Tensor

    def __init__(self, largest: Tensor, name: str) -> None:
        """UserError with `name` if `largest` is 0 or not finite."""
        super().__init__()
        from compressed_tensors.quantization import QuantizationArgs, QuantizationType
        from compressed_tensors.quantization.utils import calculate_qparams

        check_largest(largest, name, "kv8, which scales each token's own")
        self._args = QuantizationArgs(num_bits=8, type=QuantizationType.FLOAT, strategy="tensor")
        scale, _ = calculate_qparams(-largest, largest, self._args)
        self.register_buffer("scale", scale)

    def forward(self, x_BHLF: Tensor) -> Tensor:
        """Cast fp32 [..., F] and back."""
        from compressed_tensors.quantization import fake_quantize

        cast_BHLF: Tensor = fake_quantize(x_BHLF, self.scale, None, self._args)
        return cast_BHLF


class CacheCast(nn.Module):
    """Keys and values as attention reads them back, each by its own cast C: x -> C(x R) R^T.

    Rotated queries have the same products with rotated keys as plain queries with keys rotated
    back, and values can be rotated back before they are mixed. So what is rounded is what QuaRot
    rounds, while queries and outputs are never touched.
    """

    rotation_FF: Tensor | None

    def __init__(
        self, keys: nn.Module, values: nn.Module, rotation_FF: Tensor | None = None
    ) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.register_buffer("rotation_FF", _single(rotation_FF))

    def forward(self, keys_BHLF: Tensor, values_BHLF: Tensor) -> tuple[Tensor, Tensor]:
        """Cast both and back, computed in fp32, to the dtype they have."""
        return self._cast(self.keys, keys_BHLF), self._cast(self.values, values_BHLF)

    def _cast(self, cast: nn.Module, x_BHLF: Tensor) -> Tensor:
        cast_BHLF: Tensor = cast(_cached(x_BHLF, self.rotation_FF))
        if self.rotation_FF is not None:
            cast_BHLF = cast_BHLF @ self.rotation_FF.T
        return cast_BHLF.to(x_BHLF.dtype)

    def scales(self) -> dict[str, Tensor]:
        """Return `k_scale` and `v_scale`, fp32 [1], as compressed-tensors names them.

        They are for rotated keys and values, if those are rotated. UserError if every token has
        scales of its own.
        """
        if not isinstance(self.keys, ScaledCast) or not isinstance(self.values, ScaledCast):
            raise UserError("a checkpoint holds scales of an FP8 cache alone; give kvfp8")
        return {"k_scale": self.keys.scale, "v_scale": self.values.scale}


class CacheRanges(nn.Module):
    """Hands keys and values on as they are and keeps the largest |x| that a cache would hold.

    Attributes:
        largest_2: fp32, of keys and of values; infinity for what is not finite.
    """

    largest_2: Tensor
    rotation_FF: Tensor | None

    def __init__(self, rotation_FF: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("rotation_FF", _single(rotation_FF))
        self.register_buffer("largest_2", torch.zeros(2))

    def forward(self, keys_BHLF: Tensor, values_BHLF: Tensor) -> tuple[Tensor, Tensor]:
        """Update the largest |x| with a batch, and return the batch."""
        cached = [_cached(x_BHLF, self.rotation_FF) for x_BHLF in (keys_BHLF, values_BHLF)]
        largest_2 = torch.stack([x_BHLF.abs().amax() for x_BHLF in cached])
        # of NaN and a number, some libraries' maximum over ranks is the number
        largest_2 = largest_2.where(largest_2.isfinite(), torch.inf)
        self.largest_2 = self.largest_2.maximum(largest_2)
        return keys_BHLF, values_BHLF


def _single(rotation_FF: Tensor | None) -> Tensor | None:
    return None if rotation_FF is None else rotation_FF.float()


def _cached(x_BHLF: Tensor, rotation_FF: Tensor | None) -> Tensor:
    """Return what a cache holds before it is rounded, fp32."""
    return x_BHLF.float() if rotation_FF is None else x_BHLF.float() @ rotation_FF


def attach(block: Block, cache: nn.Module) -> None:
    """Let a block's attention read keys and values through `cache`.

    UserError if it is not an attention with a cache.
    """
    from transformers import AttentionInterface

    attention = block.attention
    if not hasattr(attention, "is_causal"):  # what sdpa asks every attention with a cache for
        raise UserError(
            f"{block.prefix}: {type(attention).__name__} keeps no keys and values; leave -kv out"
        )
    AttentionInterface.register(FUNCTION, _attend)
    attention.cache_cast = cache.to(next(attention.parameters()).device)
    # The function is looked up in the config, which is one for the whole model.
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = FUNCTION


def _attend(
    module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers does with sdpa, to keys and values [B, H, L, F] cast and back."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    keys, values = module.cache_cast(keys, values)
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, keys, values, mask, **options
    )
    return attended
