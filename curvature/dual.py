"""Dual numbers over tensors: every operation maps values and their derivatives along one direction.

A dual number is x + eps x_dot with eps^2 = 0 (Clifford 1873); carried through a loss with the parameters' x_dot = v it
yields the loss L and its directional derivative g.v. The derivative of g.v by the parameters is the Hessian-vector
product Hv (Pearlmutter 1994, 'Fast exact multiplication by the Hessian'). All rules are ordinary differentiable torch
code, so that second step is first-order reverse mode: no double backward, no forward AD, and any hook or checkpoint of
autograd works. Nothing is cast: float64 parameters give float64 results.

Shapes: B sequences, S positions of a sequence, K key/value heads, G query heads per key/value head, E features of a
head, I and O input and output features, N tokens (B x S), V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Dual(NamedTuple):
    """A value and its derivative along the direction of the product, of one shape."""

    value: Tensor
    tangent: Tensor

    def map(self, linear_map: Callable[[Tensor], Tensor]) -> "Dual":
        """A linear map applied: it acts on the value and on the tangent alike."""
        return Dual(linear_map(self.value), linear_map(self.tangent))

    def __add__(self, other: Self) -> "Dual":  # type: ignore[override]
        """The sum; tuples would be joined."""
        return Dual(self.value + other.value, self.tangent + other.tangent)


def rematerialised(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` and keeps only its arguments for the backward pass, which calls it again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def linear(x: Dual, weight_OI: Dual) -> Dual:
    """The product y = x W' with y_dot = x_dot W' + x W_dot'."""
    tangent = F.linear(x.tangent, weight_OI.value) + F.linear(x.value, weight_OI.tangent)
    return Dual(F.linear(x.value, weight_OI.value), tangent)


def rms_norm(x: Dual, weight: Dual, epsilon: float) -> Dual:
    """The normed w n with n = x r, r = (mean x^2 + epsilon)^(-1/2) over the last axis (Zhang and Sennrich 2019).

    n_dot = r (x_dot - n mean(n x_dot)).
    """
    scale = torch.rsqrt(x.value.square().mean(-1, keepdim=True) + epsilon)
    normed = x.value * scale
    normed_tangent = scale * (x.tangent - normed * (normed * x.tangent).mean(-1, keepdim=True))
    return Dual(weight.value * normed, weight.tangent * normed + weight.value * normed_tangent)


def swiglu(gate: Dual, up: Dual) -> Dual:
    """silu(a) u with silu(a) = a s, s = sigmoid(a), silu'(a) = s + silu(a) (1 - s) (Shazeer 2020)."""
    sigmoid = torch.sigmoid(gate.value)
    silu = gate.value * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    return Dual(silu * up.value, slope * gate.tangent * up.value + silu * up.tangent)


def _attend(query: Dual, key: Dual, value: Dual, first_query: int, scale: float) -> Dual:
    """Causal attention of consecutive queries, the first at position `first_query`, to keys 0, 1, ..."""
    keys = key.map(lambda t: t.transpose(-1, -2))
    scores = (query.value * scale) @ keys.value
    scores_tangent = (query.tangent * scale) @ keys.value + (query.value * scale) @ keys.tangent
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first_query + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    centre = (weights * scores_tangent).sum(-1, keepdim=True)
    weights_tangent = weights * (scores_tangent - centre)
    return Dual(weights @ value.value, weights_tangent @ value.value + weights @ value.tangent)


def causal_attention(
    query_BKGSE: Dual, key_BKSE: Dual, value_BKSE: Dual, *, scale: float, queries_per_chunk: int
) -> Dual:
    """softmax(scale Q K') V, each position attending to itself and before (Vaswani et al. 2017), [B, K, G, S, E].

    With weights p and scores s: p_dot = p (s_dot - sum p s_dot). Queries go through in chunks; more than one chunk are
    rematerialised in the backward pass, so the S x S weights never lie in memory all at once.
    """
    num_positions = query_BKGSE.value.shape[-2]
    keys, values = key_BKSE.map(lambda t: t.unsqueeze(2)), value_BKSE.map(lambda t: t.unsqueeze(2))
    if num_positions <= queries_per_chunk:
        return _attend(query_BKGSE, keys, values, 0, scale)
    chunks = []
    for start in range(0, num_positions, queries_per_chunk):
        stop = min(start + queries_per_chunk, num_positions)
        query = Dual(query_BKGSE.value[..., start:stop, :], query_BKGSE.tangent[..., start:stop, :])
        past_key, past_value = (Dual(t.value[..., :stop, :], t.tangent[..., :stop, :]) for t in (keys, values))
        chunks.append(rematerialised(_attend, query, past_key, past_value, start, scale))
    return Dual(torch.cat([c.value for c in chunks], -2), torch.cat([c.tangent for c in chunks], -2))


def _summed_cross_entropy(hidden_NI: Dual, weight_VI: Dual, labels_N: Tensor) -> Dual:
    logits_NV = linear(hidden_NI, weight_VI)
    weights_NV = logits_NV.value.softmax(-1)
    with (
        torch.no_grad()
    ):  # only the tangent is differentiated; logsumexp z = z_j - log p_j for every j, here the largest
        largest_N, index_N = logits_NV.value.max(-1, keepdim=True)
        log_total_N = largest_N - weights_NV.gather(-1, index_N).log()
        loss = (log_total_N - logits_NV.value.gather(-1, labels_N[:, None])).sum()
    expected = (weights_NV * logits_NV.tangent).sum()
    return Dual(loss, expected - logits_NV.tangent.gather(-1, labels_N[:, None]).sum())


def mean_cross_entropy(hidden_NI: Dual, weight_VI: Dual, labels_N: Tensor, *, tokens_per_chunk: int) -> Dual:
    """Mean of -log softmax(W h)[label], nats per token; derivative mean(sum_V p z_dot - z_dot[label]), logits z.

    Tokens go through in chunks; more than one chunk are rematerialised, so the N x V logits never lie in memory whole.
    The value carries no gradient, the tangent does.
    """
    num_tokens = len(labels_N)
    if num_tokens <= tokens_per_chunk:
        return _summed_cross_entropy(hidden_NI, weight_VI, labels_N).map(lambda total: total / num_tokens)
    sums = []
    for start in range(0, num_tokens, tokens_per_chunk):
        rows = slice(start, start + tokens_per_chunk)
        hidden = Dual(hidden_NI.value[rows], hidden_NI.tangent[rows])
        sums.append(rematerialised(_summed_cross_entropy, hidden, weight_VI, labels_N[rows]))
    values, tangents = zip(*sums, strict=True)
    return Dual(torch.stack(values).sum() / num_tokens, torch.stack(tangents).sum() / num_tokens)
