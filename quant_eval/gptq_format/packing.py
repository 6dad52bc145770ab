"""Codes of a few bits in words of 32: the four tensors of a quantized linear.

32 values of b bits fill b words as one string of bits does, the first value in the lowest bits of
the first word; one of 3 bits may begin in a word and end in the next. Codes are packed along
inputs, zeros along outputs.

Shapes: O output features, I input features, G groups of a row, V values, P words, R runs of 32
    values, N columns.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant_eval.grid import Rounded

Format = Literal["gptq", "gptq_v2"]

WORD_BITS = 32  # and the number of values in a run
# What a format takes from a zero before it stores it: "gptq" has no place for a zero of 0.
TAKEN_FROM_ZEROS: dict[Format, int] = {"gptq": 1, "gptq_v2": 0}


def pack(rounded: Rounded, bits: int, checkpoint_format: Format) -> dict[str, Tensor]:
    """Return the tensors of a linear by their last name; I and O x bits are multiples of 32.

    `qweight` int32 [I x bits / 32, O], `qzeros` int32 [G, O x bits / 32], `scales` fp16 [G, O],
    `g_idx` int32 [I].
    """
    taken, scales_OG = TAKEN_FROM_ZEROS[checkpoint_format], rounded.scales_OG.half()
    assert int(rounded.zeros_OG.min()) >= taken, (
        f"the format {checkpoint_format} has no place for a zero of 0"
    )
    assert max(int(rounded.codes_OI.max()), int(rounded.zeros_OG.max())) < 2**bits, (
        f"not of {bits} bits"
    )
    assert torch.equal(scales_OG.float(), rounded.scales_OG), "scales are no values of fp16"
    tensors = {
        "qweight": _pack_rows(rounded.codes_OI.T.contiguous(), bits),
        "qzeros": _pack_rows(rounded.zeros_OG - taken, bits).T,
        "scales": scales_OG.T,
        "g_idx": rounded.groups_I.int(),
    }
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def unpack(tensors: Mapping[str, Tensor], bits: int, checkpoint_format: Format) -> Rounded:
    """Return the linear that `pack` made them of."""
    zeros_OG = _unpack_rows(tensors["qzeros"].T, bits) + TAKEN_FROM_ZEROS[checkpoint_format]
    return Rounded(
        codes_OI=_unpack_rows(tensors["qweight"], bits).T.contiguous(),
        scales_OG=tensors["scales"].T.float().contiguous(),
        zeros_OG=zeros_OG.contiguous(),
        groups_I=tensors["g_idx"].clone(),
    )


def _places(bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each value of a run its index, first word, bit in that, and the bits that fit."""
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        yield index, word, shift, min(bits, WORD_BITS - shift)


def _pack_rows(values_VN: Tensor, bits: int) -> Tensor:
    """Unsigned values of `bits` bits to words [V x bits / 32, N] of int32."""
    num_values, width = values_VN.shape
    runs_RVN = pad(values_VN, (0, 0, 0, -num_values % WORD_BITS)).view(-1, WORD_BITS, width)
    words_RPN = torch.zeros(len(runs_RVN), bits, width, dtype=torch.int32, device=values_VN.device)
    for index, word, shift, fitting in _places(bits):
        values_RN = runs_RVN[:, index].int()
        words_RPN[:, word] |= values_RN << shift
        if fitting < bits:
            words_RPN[:, word + 1] |= values_RN >> fitting
    return words_RPN.view(-1, width)[: num_values * bits // WORD_BITS]


def _unpack_rows(words_PN: Tensor, bits: int) -> Tensor:
    """Words to values [P x 32 / bits, N] of uint8."""
    num_words, width = words_PN.shape
    words_RPN = pad(words_PN, (0, 0, 0, -num_words % bits)).view(-1, bits, width)
    runs_RVN = torch.empty(
        len(words_RPN), WORD_BITS, width, dtype=torch.uint8, device=words_PN.device
    )
    for index, word, shift, fitting in _places(bits):
        # the mask: a negative word is filled with ones from the left
        values_RN = words_RPN[:, word] >> shift & 2**fitting - 1
        if fitting < bits:
            values_RN |= (words_RPN[:, word + 1] & 2 ** (bits - fitting) - 1) << fitting
        runs_RVN[:, index] = values_RN
    return runs_RVN.view(-1, width)[: num_words * WORD_BITS // bits]
