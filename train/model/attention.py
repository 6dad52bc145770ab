"""The kernel that torch's attention takes, by name: by shapes, dtypes and GPU it takes another."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def attention_kernel(
    query_BNSD: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> str:
    """Return the kernel of `scaled_dot_product_attention` for such tensors, causal without a mask.

    One of "cudnn", "flash", "efficient" and "math", the last with probabilities in memory; "error"
    where the context allows none that takes them. Values are not read, but gradients are wanted.

    Example: a CPU has one kernel.
        >>> heads = torch.empty(1, 2, 8, 16)
        >>> attention_kernel(heads, heads, heads)
        'flash'
    """
    query_BNSD, key, value = (x.detach().requires_grad_() for x in (query_BNSD, key, value))
    choice = torch._fused_sdp_choice(
        query_BNSD,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query_BNSD.shape[1] != key.shape[1],
    )
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
