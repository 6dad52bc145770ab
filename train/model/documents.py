"""Attention inside documents: the sequences of a microbatch as one row of packed documents.

The tensors of the engines stay [S, B, ...], so layouts and the rotary embedding, whose positions
count from the start of the sequence, are as without a mask.

Shapes: S tokens, B sequences, T = B x S, D documents, N heads of this rank, E head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def document_bounds(starts_BS: Tensor) -> Tensor:
    """Return where documents begin in the row, and T: int32 [D + 1] on the CPU, as is the mask.

    Args:
        starts_BS: bool, true at the first token of every document and of every sequence.

    Example: two sequences of three tokens, a document begins within the first.
        >>> document_bounds(torch.tensor([[True, False, True], [True, False, False]])).tolist()
        [0, 2, 3, 6]
    """
    starts_D = starts_BS.flatten().nonzero().flatten()
    return F.pad(starts_D, (0, 1), value=starts_BS.numel()).int()


def document_numbers(bounds: Tensor, length: int) -> Tensor:
    """Return the number of every token's document, [B, S] with S = `length`.

    Example:
        >>> document_numbers(torch.tensor([0, 2, 3, 6]), length=3).tolist()
        [[0, 0, 1], [2, 2, 2]]
    """
    numbers_D = torch.arange(len(bounds) - 1, device=bounds.device)
    return numbers_D.repeat_interleave(bounds.diff()).view(-1, length)


def packed(x_SBNE: Tensor) -> Tensor:
    """Return heads as one row, [T, N, E].

    Example: the row is sequence after sequence.
        >>> packed(torch.arange(4).view(2, 2, 1, 1)).flatten().tolist()
        [0, 2, 1, 3]
    """
    return x_SBNE.transpose(0, 1).flatten(0, 1)


def unpacked(x_TH: Tensor, like_SBNE: Tensor) -> Tensor:
    """Return the row as [S, B, ...]."""
    length, sequences = like_SBNE.shape[:2]
    return x_TH.view(sequences, length, -1).transpose(0, 1).contiguous()


def takes_packed(x: Tensor) -> bool:
    """Return whether attention takes a tensor's dtype and device as one row of packed documents."""
    return x.is_cuda and x.dtype != torch.float32


def attention_in_documents(
    query_SBNE: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    """Return causal softmax attention [S, B, N x E] of every document by itself.

    In 16 bits on a GPU by flash attention, elsewhere document after document. The bounds are on the
    device, `longest` is the largest difference of two.
    """
    query_TNE, key, value = (packed(x) for x in (query_SBNE, key, value))
    if takes_packed(query_SBNE):
        out_TNE = varlen_attn(
            query_TNE,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            window_size=(-1, 0),  # causal
            enable_gqa=query_TNE.shape[1] != key.shape[1],
        )
        assert isinstance(out_TNE, Tensor)
    else:
        lengths = bounds.diff().tolist()
        pieces = zip(*(x_TNE.split(lengths) for x_TNE in (query_TNE, key, value)), strict=True)
        out_TNE = torch.cat([_attention(*piece) for piece in pieces])
    return unpacked(out_TNE.flatten(1), query_SBNE)


def _attention(query_TNE: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention over all T tokens, [T, N, E]."""
    # scaled_dot_product_attention takes [B, N, T, E]: here one document is the batch.
    query, key, value = (x.transpose(0, 1)[None] for x in (query_TNE, key, value))
    grouped = query.shape[1] != key.shape[1]
    out_1NTE = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return out_1NTE[0].transpose(0, 1)
