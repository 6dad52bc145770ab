"""The cross-entropy of a linear head in dual numbers, whose gradient is made in the forward pass.

The loss is the end of the forward pass and the beginning of the backward pass, so what the latter
needs of a chunk of tokens can be computed while its logits are there: they are made once, and are
never in memory whole.

Shapes: N tokens, C tokens of a chunk, I input features, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from curvature.dual.numbers import Dual
from curvature.dual.one_pass import one_pass, wide
from train.model.accumulation import add_product, sums_like


def summed_cross_entropy(
    hidden_NI: Dual, weight_VI: Dual, labels_N: Tensor, *, tokens_per_chunk: int
) -> Dual:
    """Return the sum over tokens of -log softmax(W h)[label], nats.

    With logits z and p = softmax(z) its derivative is sum(c - z_dot[label]), c = sum_V p z_dot. The
    value carries no gradient, the tangent does.

    Example: logits of 0, and of slopes 1 and 0: log 2 nats, and 1/2 - 1 for the first label.
        >>> hidden_NI = Dual(torch.ones(1, 2), torch.zeros(1, 2))
        >>> weight_VI = Dual(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        >>> loss = summed_cross_entropy(hidden_NI, weight_VI, torch.tensor([0]), tokens_per_chunk=1)
        >>> round(float(loss.value), 4), round(float(loss.tangent), 4)
        (0.6931, -0.5)
    """
    loss, slope = _CrossEntropy.apply(*hidden_NI, *weight_VI, labels_N, tokens_per_chunk)
    return Dual(loss, slope)


@one_pass
def _losses(logits_CV: Tensor, slopes_CV: Tensor, labels_C1: Tensor) -> tuple[Tensor, ...]:
    """Return two sums, the loss and its derivative, and the latter's gradients.

    By z they are p (z_dot - c), by z_dot they are p less 1 at the label. The entry there comes as a
    column of its own: where p is close to 1, bf16 would lose what is left.
    """
    dtype, logits_CV, slopes_CV = logits_CV.dtype, wide(logits_CV), wide(slopes_CV)
    p_CV = logits_CV.softmax(-1)
    # log sum_V e^z = z_j - log p_j for every j, here the largest.
    log_total_C1 = logits_CV.amax(-1, keepdim=True) - p_CV.amax(-1, keepdim=True).log()
    by_logits_CV = p_CV * slopes_CV
    centre_C1 = by_logits_CV.sum(-1, keepdim=True)
    by_logits_CV.addcmul_(p_CV, centre_C1, value=-1)
    return (
        (log_total_C1 - logits_CV.gather(-1, labels_C1)).sum(),
        (centre_C1 - slopes_CV.gather(-1, labels_C1)).sum(),
        by_logits_CV.to(dtype),
        p_CV.to(dtype),
        (p_CV.gather(-1, labels_C1) - 1).to(dtype),
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_NI: Tensor,
        h_dot_NI: Tensor,
        w_VI: Tensor,
        w_dot_VI: Tensor,
        labels_N: Tensor,
        tokens_per_chunk: int,
    ) -> tuple[Tensor, Tensor]:
        h_NI, h_dot_NI = h_NI.to(w_VI.dtype), h_dot_NI.to(w_VI.dtype)
        by_h_NI, by_h_dot_NI = torch.empty_like(h_NI), torch.empty_like(h_dot_NI)
        by_w_VI = sums_like(w_VI)
        losses, slopes = [], []
        for start in range(0, len(labels_N), tokens_per_chunk):
            rows = slice(start, start + tokens_per_chunk)
            h_CI, h_dot_CI, labels_C1 = h_NI[rows], h_dot_NI[rows], labels_N[rows, None]
            slopes_CV = torch.addmm(h_dot_CI @ w_VI.T, h_CI, w_dot_VI.T)
            loss, slope, by_z_CV, by_z_dot_CV, at_label_C1 = _losses(
                h_CI @ w_VI.T, slopes_CV, labels_C1
            )
            by_z_dot_CV.scatter_(-1, labels_C1, at_label_C1)
            by_h_NI[rows] = torch.addmm(by_z_CV @ w_VI, by_z_dot_CV, w_dot_VI)
            torch.mm(by_z_dot_CV, w_VI, out=by_h_dot_NI[rows])
            # The slope's gradient by W is by_z' h + by_z_dot' h_dot; W_dot is given and needs none.
            for by_CV, read_CI in ((by_z_CV, h_CI), (by_z_dot_CV, h_dot_CI)):
                add_product(by_w_VI, by_CV, read_CI)
            losses.append(loss)
            slopes.append(slope)
        ctx.gradients, ctx.dtype = [by_h_NI, by_h_dot_NI, by_w_VI], w_VI.dtype
        loss, slope = torch.stack(losses).sum(), torch.stack(slopes).sum()
        ctx.mark_non_differentiable(loss)
        return loss, slope

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _by_loss: Tensor, by_slope: Tensor) -> Any:  # type: ignore[override]
        # In place: each graph is walked back once, a second backward pass would scale twice.
        by_h_NI, by_h_dot_NI, by_w_VI = (gradient.mul_(by_slope) for gradient in ctx.gradients)
        return by_h_NI, by_h_dot_NI, by_w_VI.to(ctx.dtype), None, None, None
