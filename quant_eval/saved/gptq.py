"""The layout of a GPTQ checkpoint, as config.json states it and loaders read it.

gptqmodel 7.6 loads all that is written here. Symmetric checkpoints are written as "gptq" (version
1), which every loader reads. Asymmetric ones are written as "gptq_v2": a zero may be 0, version 1
stores zeros less one, and loaders differ in what they make of the -1 (gptqmodel refuses asymmetric
version 1 of others). vLLM reads 4 and 8 symmetric bits in groups of 32, 64, 128 or a whole row; 2
and 3 bits, and "gptq_v2", some versions only.

32 values of b bits fill b words as one string of bits does, the first value in the lowest bits of
the first word; one of 3 bits may begin in a word and end in the next. compressed-tensors packs so,
but from signed values. Codes are packed along inputs, zeros along outputs.

Shapes: O output features, I input features, G groups of a row.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from base.errors import UserError
from base.frozen import Frozen
from ckpt_tools.formats.weights import Described, Weights
from quant_eval.group import Rounded
from quant_eval.model.streamed import Block
from quant_eval.quantizer import GridSpec, QuantSpec
from quant_eval.transforms.steps import Transform

Format = Literal["gptq", "gptq_v2"]

WORD_BITS = 32
# A format subtracts this from a zero before it stores it: "gptq" has no place for a zero of 0.
ZERO_OFFSETS: dict[Format, int] = {"gptq": 1, "gptq_v2": 0}
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # that gptqmodel takes, besides a whole row
WHOLE_ROW = -1


class GPTQSettings(Frozen):
    """`quantization_config` of config.json, with the keys that all loaders need."""

    quant_method: Literal["gptq"] = "gptq"
    bits: Literal[2, 3, 4, 8]
    group_size: int = Field(ge=-1, description="inputs that share a scale; -1: a whole row does")
    desc_act: bool = Field(
        description="whether groups are other than neighbouring inputs, so that kernels need g_idx"
    )
    sym: bool
    checkpoint_format: Format
    pack_dtype: Literal["int32"] = "int32"
    format: Format
    lm_head: Literal[False] = False

    def natural_groups(self, num_inputs: int) -> Tensor:
        """Return g_idx of groups of neighbouring inputs, int32 [I]."""
        size = num_inputs if self.group_size == WHOLE_ROW else self.group_size
        return torch.arange(num_inputs, dtype=torch.int32) // size


def settings_of(spec: QuantSpec) -> GPTQSettings:
    """Return the settings of a saved result, with `desc_act` still to be set by the groups.

    UserError if the saved weights would not be the measured ones, or no loader takes them.
    """
    assert isinstance(spec, GridSpec)
    assert spec.scales == "fp16", "the format holds no other scales"
    if spec.bits not in (2, 3, 4, 8):
        raise UserError(
            f"spec {spec.name}: GPTQ checkpoints hold 2, 3, 4 or 8 bits, not {spec.bits}; change -b"
            ", or leave -s16 out"
        )
    if spec.group_size not in (None, *GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise UserError(
            f"spec {spec.name}: gptqmodel loads groups of {sizes}; change -g, or give perchannel"
        )
    checkpoint_format: Format = "gptq" if spec.symmetric else "gptq_v2"
    return GPTQSettings(
        bits=spec.bits,  # type: ignore[arg-type]  # checked above
        group_size=spec.group_size or WHOLE_ROW,
        desc_act=False,
        sym=spec.symmetric,
        checkpoint_format=checkpoint_format,
        format=checkpoint_format,
    )


class GPTQFormat:
    """One checkpoint in the GPTQ format.

    Attributes:
        settings: `quantization_config` of config.json, final after the last linear.
    """

    scales = "scales"  # last name of the tensor that only packed linears have

    def __init__(self, settings: GPTQSettings) -> None:
        self._settings = settings

    @property
    def settings(self) -> dict[str, Any]:
        """The value of `quantization_config` in config.json."""
        return self._settings.model_dump()

    def check_linears(self, linears: Mapping[str, nn.Linear]) -> None:
        """Refuse linears whose codes or zeros do not fill words."""
        bits = self._settings.bits
        # The least number of zeros that fills whole words of 32 bits.
        of_zeros = next(count for count in (4, 8, 16, 32) if count * bits % WORD_BITS == 0)
        for name, linear in linears.items():
            for what, count, multiple in (
                ("outputs", linear.out_features, of_zeros),
                ("inputs", linear.in_features, WORD_BITS),
            ):
                if count % multiple:
                    raise UserError(
                        f"{name} has {count} {what}; loaders of GPTQ checkpoints need a multiple of"
                        f" {multiple} to unpack {bits} bits; leave -s16 out"
                    )

    def pack(self, linear: str, rounded: Rounded, inputs: Transform | None) -> dict[str, Tensor]:
        """Return the tensors of a linear by name.

        Groups are of `group_size` inputs each.
        """
        assert inputs is None or not len(inputs.steps), "the format has no transforms"
        tensors = pack(rounded, self._settings.bits, self._settings.checkpoint_format)
        natural_I = self._settings.natural_groups(len(tensors["g_idx"]))
        assert torch.equal(tensors["g_idx"].sort().values, natural_I), "groups are not of one size"
        # `desc_act` is one setting for all linears: kernels read g_idx where it is set.
        if not torch.equal(tensors["g_idx"], natural_I):
            self._settings = self._settings.model_copy(update={"desc_act": True})
        return {f"{linear}.{key}": tensor for key, tensor in tensors.items()}

    def block_tensors(self, block: Block) -> dict[str, Tensor]:  # noqa: ARG002
        """Return none: a block holds nothing besides its linears' codes."""
        return {}

    def is_weight(self, name: str) -> bool:  # noqa: ARG002
        """Return whether a tensor of another module than packed linears is one of the model's."""
        return True

    def weight_shape(self, parts: Mapping[str, Described]) -> tuple[int, int]:
        """Return the shape [O, I] of the weight that tensors of a linear hold."""
        return parts["qweight"].shape[1], parts["g_idx"].shape[0]

    def dense(self, linear: str, parts: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Return the weight that was measured, fp32 [O, I]."""
        return unpack(parts, self._settings.bits, self._settings.checkpoint_format).dense()

    def restore(self, block: Block, tensors: Weights) -> None:
        """Change nothing: the weights are all that the format holds."""


def pack(rounded: Rounded, bits: int, checkpoint_format: Format) -> dict[str, Tensor]:
    """Return the tensors of a linear by their last name.

    I and O x bits have to be multiples of 32.

    `qweight` int32 [I x bits / 32, O], `qzeros` int32 [G, O x bits / 32], `scales` fp16 [G, O],
    `g_idx` int32 [I].

    Example: 32 x 32 codes of 4 bits are 4 words of 32 bits for every output.
        >>> from quant_eval.specs import parse_spec
        >>> from quant_eval.rounding.grid import round_to_nearest
        >>> rounded = round_to_nearest(torch.eye(32), parse_spec("rtn-b4-g32-s16"))
        >>> tensors = pack(rounded, 4, "gptq_v2")
        >>> {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        {'qweight': (4, 32), 'qzeros': (1, 4), 'scales': (1, 32), 'g_idx': (32,)}
        >>> torch.equal(unpack(tensors, 4, "gptq_v2").dense(), rounded.dense())
        True
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    offset, scales_OG = ZERO_OFFSETS[checkpoint_format], rounded.scales_OG.half()
    assert int(rounded.zeros_OG.min()) >= offset, (
        f"the format {checkpoint_format} has no place for a zero of 0"
    )
    assert max(int(rounded.codes_OI.max()), int(rounded.zeros_OG.max())) < 2**bits, (
        f"not of {bits} bits"
    )
    assert torch.equal(scales_OG.float(), rounded.scales_OG), "scales are not values of fp16"
    middle = 2 ** (bits - 1)
    # Packing is from signed values, around the middle; uint8 would wrap below it.
    codes_IO = (rounded.codes_OI.short() - middle).to(torch.int8).T
    zeros_GO = (rounded.zeros_OG.short() - offset - middle).to(torch.int8).T
    tensors = {
        "qweight": pack_to_int32(codes_IO, bits, packed_dim=0),
        "qzeros": pack_to_int32(zeros_GO, bits),
        "scales": scales_OG.T,
        "g_idx": rounded.groups_I.int(),
    }
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def unpack(tensors: Mapping[str, Tensor], bits: int, checkpoint_format: Format) -> Rounded:
    """Return the linear that `pack` was given."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    (num_inputs,), scales_GO = tensors["g_idx"].shape, tensors["scales"]
    shape_IO = torch.Size([num_inputs, scales_GO.shape[1]])
    codes_IO = unpack_from_int32(tensors["qweight"], bits, shape_IO, packed_dim=0)
    zeros_GO = unpack_from_int32(tensors["qzeros"], bits, scales_GO.shape)
    middle = 2 ** (bits - 1)
    return Rounded(
        codes_OI=(codes_IO.short() + middle).to(torch.uint8).T.contiguous(),
        scales_OG=scales_GO.T.float().contiguous(),
        zeros_OG=(zeros_GO.short() + middle + ZERO_OFFSETS[checkpoint_format])
        .to(torch.uint8)
        .T.contiguous(),
        groups_I=tensors["g_idx"].clone(),
    )
