"""LLM.int8() (arXiv:2208.07339) and NF4 (arXiv:2305.14314) by bitsandbytes.

Shapes: O output features, I input features. A call's tokens are all that the linear is given at
    once.
"""

import logging
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, quantize_4bit
from bitsandbytes.nn.modules import Int8Params, Linear8bitLt
from torch import Tensor, nn

from base.errors import UserError


def int8_linear(name: str, linear: nn.Linear, threshold: float) -> Linear8bitLt:
    """Return LLM.int8()'s module for a linear, which rounds activations too.

    The weight is cast to fp16 and each row rounded to 127 steps of its max|w| either way. At every
    call the inputs are cast to fp16 and each token rounded to 127 steps of its max|x| over the
    values below `threshold`; products of codes are summed in int32 (on a CPU without AVX-512 in
    fp32), scaled in fp32 and returned in the inputs' dtype. A feature that reaches the threshold
    at any token of the call is left out of that for every token of it; its products, with the
    decoded weights, are added in the inputs' dtype. At threshold 0 no feature is. So results depend
    on which tokens share a call, on the batch size too. On a CPU bitsandbytes scales by
    6.200124e-05 where 1 / 127^2 is 6.200012e-05: there the int8 part is too large by 1.8e-5 of
    itself. UserError with `name` if a weight overflows fp16.
    """
    # it warns of the cast at every call
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    if float(linear.weight.detach().abs().max()) > torch.finfo(torch.float16).max:
        raise UserError(
            f"{name}: a weight overflows fp16, which LLM.int8() starts from; use another method"
        )
    replacement = Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=threshold,
        device="meta",
    )
    weight: Any = Int8Params(
        linear.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False
    )
    # here it is rounded: only ever on the way from a CPU
    replacement.weight = weight.to(linear.weight.device)
    replacement.bias = linear.bias
    # in training, a CPU rounds weights alone
    int8: Linear8bitLt = replacement.requires_grad_(False).eval()
    return int8


def dense_weight(linear: nn.Module) -> Tensor:
    """Return the decoded weight of a replaced linear, code * max|row| / 127, fp32 [O, I]."""
    assert isinstance(linear, Linear8bitLt)
    codes: Any = linear.weight
    # the first call moves them
    scales_O: Any = linear.state.SCB if codes.SCB is None else codes.SCB
    weight_OI: Tensor = int8_vectorwise_dequant(codes.data, scales_O)
    return weight_OI


def nf4_dense(weight_OI: Tensor, group_size: int) -> Tensor:
    """Return what the NF4 codes of a weight decode to, fp32 [O, I].

    The groups are of a size that bitsandbytes takes.

    Example: -1, 0 and 1 times the largest weight of a group are among the 16 points.
        >>> weight_OI = torch.zeros(1, 64)
        >>> weight_OI[0, :2] = torch.tensor([2.0, -2.0])
        >>> torch.equal(nf4_dense(weight_OI, 64), weight_OI)
        True
    """
    codes, state = quantize_4bit(
        weight_OI.detach().float().contiguous(),
        blocksize=group_size,
        quant_type="nf4",
        compress_statistics=False,
    )
    # from groups of 2048 on, it would compile anew for every shape
    with torch.compiler.set_stance("force_eager"):
        dense_OI: Tensor = dequantize_4bit(codes, state)
    return dense_OI
