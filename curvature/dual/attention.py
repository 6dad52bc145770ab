"""Causal attention in dual numbers whose backward pass makes the weights anew.

Weights are in memory for a chunk of queries alone, forward and backward, as in FlashAttention (Dao
et al. 2022, arXiv 2205.14135), here with tangents: with scores s, weights p = softmax(s) and their
mean slope c = sum_S p s_dot,
    p_dot = p t with t = s_dot - c,    o = p v,    o_dot = p_dot v + p v_dot.
For gradients H by o and G by o_dot
    by p: b = H v' + G v_dot',    by p_dot: a = G v',    u = a - sum_S p a,
    by s_dot: p u,    by s: p (w - sum_S p w) with w = b + u t.
FlashAttention has the row's product G.o for sum_S p a. In fp32 that leaves rounding where u is 0,
at a query that sees one key, and a narrow norm of queries and keys amplifies it.

Shapes: B sequences, S positions of a sequence, K key/value heads, G query heads per key/value head,
    E features of a head, N batches of products (B x K), Q queries of a chunk (times G), C queries
    of one head, T keys that some of them see.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from curvature.dual.numbers import Dual
from curvature.dual.one_pass import one_pass, wide
from train.model.accumulation import sums_like

# More chunks leave out more of the products with keys that are hidden; few rows at a time are slow.
CHUNKS, FEWEST_QUERIES = 8, 32


def causal_attention(
    query_BKGSE: Dual,
    key_BKSE: Dual,
    value_BKSE: Dual,
    *,
    scale: float,
    queries_per_chunk: int,
    window: int | None = None,
) -> Dual:
    """Return causal attention softmax(scale Q K') V (Vaswani et al. 2017), [B, S, K G E].

    With a window a query sees its own token and those before it, up to so many in all (arXiv
    2310.06825).
    """
    batch, num_kv_heads, groups, positions, head_dim = query_BKGSE.value.shape
    rows = min(queries_per_chunk, max(FEWEST_QUERIES, -(-positions // CHUNKS)))
    # Scaled queries scale the scores, at the cost of S x E numbers instead of S x S.
    mixed = _Attention.apply(
        *query_BKGSE.map(lambda t: t.flatten(0, 1) * scale),
        *key_BKSE.map(lambda t: t.flatten(0, 1)),
        *value_BKSE.map(lambda t: t.flatten(0, 1)),
        rows,
        window,
    )
    return Dual(*mixed).map(
        lambda t: (
            t.view(batch, num_kv_heads, groups, positions, head_dim)
            .permute(0, 3, 1, 2, 4)
            .flatten(2)
        )
    )


class _Chunk(NamedTuple):
    """A chunk of queries: their places, the keys that some of them see, and those hidden to others.

    The mask is of the last H keys.
    """

    start: int
    stop: int
    keys: slice
    hidden_CH: Tensor

    def rows(self, x_NGSE: Tensor) -> Tensor:
        """Return the rows of all heads of a group, stacked, [N, Q, E]."""
        return x_NGSE[:, :, self.start : self.stop].flatten(1, 2)

    def put(self, x_NGSE: Tensor, rows_NQE: Tensor) -> None:
        x_NGSE[:, :, self.start : self.stop] = rows_NQE.unflatten(1, (x_NGSE.shape[1], -1))


def _chunks(
    positions: int, rows: int, window: int | None, device: torch.device
) -> Iterator[_Chunk]:
    # Keys before a chunk are seen by all of its queries: only the square at its end needs a mask.
    above_CC = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
    for start in range(0, positions, rows):
        stop = min(start + rows, positions)
        if window is None:
            hidden = above_CC[: stop - start, : stop - start]
            yield _Chunk(start, stop, slice(stop), hidden)
            continue
        # In windows the first query of a chunk sees the earliest key.
        first = max(0, start - window + 1)
        query_C1 = torch.arange(start, stop, device=device)[:, None]
        key_1T = torch.arange(first, stop, device=device)[None]
        hidden = (key_1T > query_C1) | (key_1T <= query_C1 - window)
        yield _Chunk(start, stop, slice(first, stop), hidden)


def _scores(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return s = q k' and s_dot = q_dot k' + q k_dot', each [N, Q, T]."""
    (q_NQE, q_dot_NQE), (k_NET, k_dot_NET) = query, (tensor.transpose(1, 2) for tensor in key)
    return q_NQE @ k_NET, torch.baddbmm(q_dot_NQE @ k_NET, q_NQE, k_dot_NET)


def _softmax(scores_NQT: Tensor, hidden_CH: Tensor) -> Tensor:
    """Return the weights, 0 for hidden keys: the mask is of the last H columns."""
    wide_NQT, (queries, masked) = wide(scores_NQT), hidden_CH.shape
    # Rows are G heads times C queries, and every head has the same mask.
    last_NGCH = wide_NQT.unflatten(1, (-1, queries))[..., -masked:]
    last_NGCH.masked_fill_(hidden_CH, float("-inf"))
    return wide_NQT.softmax(-1)


@one_pass
def _weights(
    scores_NQT: Tensor, slopes_NQT: Tensor, hidden_CH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, p_dot and c [N, Q, 1]. The scores are overwritten."""
    p_NQT = _softmax(scores_NQT, hidden_CH)
    p_dot_NQT = p_NQT * slopes_NQT
    centre_NQ1 = p_dot_NQT.sum(-1, keepdim=True)
    p_dot_NQT.addcmul_(p_NQT, centre_NQ1, value=-1)
    return p_NQT.to(scores_NQT.dtype), p_dot_NQT.to(scores_NQT.dtype), centre_NQ1


@one_pass
def _score_gradients(
    scores_NQT: Tensor,
    slopes_NQT: Tensor,
    by_p_NQT: Tensor,
    by_p_dot_NQT: Tensor,
    centre_NQ1: Tensor,
    hidden_CH: Tensor,
) -> list[Tensor]:
    """Return p, p_dot and the gradients by s and s_dot. The scores are overwritten."""
    p_NQT = _softmax(scores_NQT, hidden_CH)
    t_NQT = slopes_NQT - centre_NQ1
    u_NQT = by_p_dot_NQT - (p_NQT * by_p_dot_NQT).sum(-1, keepdim=True)
    w_NQT = torch.addcmul(by_p_NQT, u_NQT, t_NQT)
    w_NQT = w_NQT - (p_NQT * w_NQT).sum(-1, keepdim=True)
    # p, p_dot = p t, and the gradients by s and s_dot, in the memory of t, w and u.
    products = p_NQT, t_NQT.mul_(p_NQT), w_NQT.mul_(p_NQT), u_NQT.mul_(p_NQT)
    return [product.to(scores_NQT.dtype) for product in products]


class _Attention(torch.autograd.Function):
    """Attention of queries [N, G, S, E] to keys and values [N, S, E], each with its tangent."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, rows, window = arguments
        q_NGSE, q_dot_NGSE, *others = tensors
        k_NSE, k_dot_NSE, v_NSE, v_dot_NSE = (tensor.contiguous() for tensor in others)
        o_NGSE, o_dot_NGSE = torch.empty_like(q_NGSE), torch.empty_like(q_NGSE)
        centre_NGS1 = wide(q_NGSE.new_empty((*q_NGSE.shape[:-1], 1)))
        for chunk in _chunks(q_NGSE.shape[2], rows, window, q_NGSE.device):
            q, q_dot = chunk.rows(q_NGSE), chunk.rows(q_dot_NGSE)
            k, k_dot, v, v_dot = (
                tensor[:, chunk.keys] for tensor in (k_NSE, k_dot_NSE, v_NSE, v_dot_NSE)
            )
            p, p_dot, centre = _weights(*_scores((q, q_dot), (k, k_dot)), chunk.hidden_CH)
            chunk.put(o_NGSE, p @ v)
            chunk.put(o_dot_NGSE, torch.baddbmm(p_dot @ v, p, v_dot))
            chunk.put(centre_NGS1, centre)
        ctx.rows, ctx.window = rows, window
        ctx.save_for_backward(*tensors, centre_NGS1)
        return o_NGSE, o_dot_NGSE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_o_NGSE: Tensor, by_o_dot_NGSE: Tensor) -> Any:  # type: ignore[override]
        q_NGSE, q_dot_NGSE, *others, centre_NGS1 = ctx.saved_tensors
        k_NSE, k_dot_NSE, v_NSE, v_dot_NSE = (tensor.contiguous() for tensor in others)
        by_q_NGSE, by_q_dot_NGSE = torch.empty_like(q_NGSE), torch.empty_like(q_NGSE)
        # Summed over chunks, so in fp32 or wider, and rounded once at the end.
        by_k, by_k_dot, by_v, by_v_dot = (sums_like(k_NSE) for _ in range(4))
        for chunk in _chunks(q_NGSE.shape[2], ctx.rows, ctx.window, q_NGSE.device):
            keys = chunk.keys
            q, q_dot = chunk.rows(q_NGSE), chunk.rows(q_dot_NGSE)
            by_o, by_o_dot = chunk.rows(by_o_NGSE), chunk.rows(by_o_dot_NGSE)
            k, k_dot, v, v_dot = (
                tensor[:, keys] for tensor in (k_NSE, k_dot_NSE, v_NSE, v_dot_NSE)
            )

            # the weights anew, and the gradients by them and by the scores
            # a = G v' and b = H v' + G v_dot' have the form of scores with G for q and H for q_dot.
            by_p_dot, by_p = _scores((by_o_dot, by_o), (v, v_dot))
            p, p_dot, by_s, by_s_dot = _score_gradients(
                *_scores((q, q_dot), (k, k_dot)),
                by_p,
                by_p_dot,
                chunk.rows(centre_NGS1),
                chunk.hidden_CH,
            )

            # queries are in this chunk alone, keys and values in several
            chunk.put(by_q_NGSE, torch.baddbmm(by_s @ k, by_s_dot, k_dot))
            chunk.put(by_q_dot_NGSE, by_s_dot @ k)
            by_k[:, keys] += torch.baddbmm(by_s.mT @ q, by_s_dot.mT, q_dot)
            by_k_dot[:, keys] += by_s_dot.mT @ q
            by_v[:, keys] += torch.baddbmm(p.mT @ by_o, p_dot.mT, by_o_dot)
            by_v_dot[:, keys] += p.mT @ by_o_dot
        by_keys = (by_NSE.to(k_NSE.dtype) for by_NSE in (by_k, by_k_dot, by_v, by_v_dot))
        return by_q_NGSE, by_q_dot_NGSE, *by_keys, None, None
