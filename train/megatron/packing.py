"""Attention inside documents: the sequences of a microbatch as one row of packed documents.

`train.megatron.pipeline` makes the parameters, the attention of either kind of kernels takes them.
mcore's own tensors stay [S, B, ...], so layouts and the rotary embedding, whose positions count
from the start of the sequence, are as without a mask.

Shapes: S tokens, B sequences, T = B x S, N heads of this rank, D head size.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def packed_documents(starts_BS: Tensor, device: torch.device) -> PackedSeqParams:
    """Return the bounds of the documents; the mask says, on the host, which inputs begin one."""
    starts = starts_BS.flatten().nonzero().flatten().tolist()
    bounds = torch.tensor([*starts, starts_BS.numel()], dtype=torch.int32, device="cpu")
    longest = int(bounds.diff().max())
    on_device = bounds.to(device, non_blocking=True)
    # mcore unpacks nothing by itself in this format.
    return PackedSeqParams("sbhd", on_device, on_device, None, None, longest, longest)


def document_numbers(documents: PackedSeqParams, length: int) -> Tensor:
    """Return the number of every token's document, [B, S] with S = `length`."""
    bounds = documents.cu_seqlens_q
    numbers_D = torch.arange(len(bounds) - 1, device=bounds.device)
    return numbers_D.repeat_interleave(bounds.diff()).view(-1, length)


def _packed(x_SBND: Tensor) -> Tensor:
    return x_SBND.transpose(0, 1).flatten(0, 1)


def _unpacked(x_TH: Tensor, like_SBND: Tensor) -> Tensor:
    length, sequences = like_SBND.shape[:2]
    return x_TH.view(sequences, length, -1).transpose(0, 1).contiguous()


def attention_in_documents(
    query_SBND: Tensor, key: Tensor, value: Tensor, documents: PackedSeqParams
) -> Tensor:
    """Return causal softmax attention [S, B, N x D] of every document by itself.

    In 16 bits on a GPU by flash attention, elsewhere document after document.
    """
    query_TND, key, value = (_packed(x) for x in (query_SBND, key, value))
    bounds, longest = documents.cu_seqlens_q, documents.max_seqlen_q
    if query_SBND.is_cuda and query_SBND.dtype != torch.float32:
        out_TND = varlen_attn(
            query_TND,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            window_size=(-1, 0),  # causal
            enable_gqa=query_TND.shape[1] != key.shape[1],
        )
        assert isinstance(out_TND, Tensor)
    else:
        lengths = bounds.diff().tolist()
        pieces = zip(*(x_TND.split(lengths) for x_TND in (query_TND, key, value)), strict=True)
        out_TND = torch.cat([_attention(*piece) for piece in pieces])
    return _unpacked(out_TND.flatten(1), query_SBND)


def _attention(query_TND: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention over all T tokens, [T, N, D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_TND, key, value))
    grouped = query.shape[1] != key.shape[1]
    out_1NTD = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return out_1NTD[0].transpose(0, 1)


def with_documents(attention: Any) -> Any:
    """Return Transformer Engine's attention, given documents in its format of packed sequences."""

    class DocumentAttention(attention):  # type: ignore[misc]
        """Attention over sequences, or inside documents."""

        def forward(
            self,
            query_SBND: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> Tensor:
            if packed_seq_params is None:
                out: Tensor = super().forward(query_SBND, key, value, *args, **kwargs)
                return out
            packed = replace(packed_seq_params, qkv_format="thd")
            tensors = (_packed(x) for x in (query_SBND, key, value))
            out_TH = super().forward(*tensors, *args, packed_seq_params=packed, **kwargs)
            return _unpacked(out_TH.flatten(1), query_SBND)

    return DocumentAttention
