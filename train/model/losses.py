"""The head and both losses, in chunks of tokens: the logits of a microbatch never exist at once.

The heads of both engines call this: `train.megatron.loss` and `train.deepspeed.model`.

Shapes: T tokens, C tokens of a chunk, H hidden size, V rows of the vocabulary on this rank.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.model.accumulation import LOSS_CHUNK_TOKENS, add_product, sums_like
from train.model.elementwise import Group, compiled_on_gpu

CPU_CHUNK_TOKENS = 256  # whose logits at a few thousand rows stay in the cache of a core


class Targets(NamedTuple):
    """The labels of all tokens, which of them count, and the factor of z-loss."""

    labels_T: Tensor
    counted_T: Tensor
    z_loss: float


def head_losses(
    hidden_TH: Tensor, weight_VH: Tensor, targets: Targets, group: Group = None
) -> tuple[Tensor, Tensor]:
    """Return the loss to differentiate, and sums of both losses.

    The loss is cross-entropy and z-loss in fp32, over the number of labels; the sums [2] are both
    over counted labels, in nats, in fp64. First-order gradients are exact; they are computed here,
    in the forward pass, chunk by chunk. That by the weight is summed in fp32, so that it does not
    depend on the number of chunks.

    Args:
        hidden_TH: the inputs of the head, whose dtype the factors of all products have.
        weight_VH: the head's rows on this rank, of that dtype or a wider one.
        targets: of all T tokens.
        group: ranks that have the other rows of the vocabulary, in the order of ranks, if any.
    """
    losses: tuple[Tensor, Tensor] = _HeadLosses.apply(
        hidden_TH, weight_VH, targets, group, torch.is_grad_enabled()
    )
    return losses


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets: Targets,
        group: Group,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        weight_VH = weight_VH.to(hidden_TH.dtype)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden_TH.device)
        num_labels = len(targets.labels_T)
        chunk_tokens = CPU_CHUNK_TOKENS if hidden_TH.is_cpu else LOSS_CHUNK_TOKENS
        if differentiate:
            by_hidden_TH, by_weight_VH = torch.empty_like(hidden_TH), sums_like(weight_VH)

        for start in range(0, num_labels, chunk_tokens):
            # Both losses of the chunk.
            part = slice(start, start + chunk_tokens)
            chunk = Targets(targets.labels_T[part], targets.counted_T[part], targets.z_loss)
            hidden_CH = hidden_TH[part]
            logits_CV = hidden_CH @ weight_VH.t()
            local_C, index_C1 = _rows_of_this_rank(chunk.labels_T, len(weight_VH), group)
            log_z_C, label_logit_C = _normalizer(logits_CV, local_C, index_C1, group)
            losses_C = log_z_C - label_logit_C, chunk.z_loss * log_z_C.square()
            sums += torch.stack([x_C.where(chunk.counted_T, 0).double().sum() for x_C in losses_C])

            # The gradient by the logits, and with it those by the hidden states and the weight.
            if differentiate:
                # That of log Z - logit + z (log Z)^2: softmax (1 + 2 z log Z), less 1 at the label.
                scale_C = chunk.counted_T / num_labels
                by_logits_CV = _shares(
                    logits_CV, log_z_C, scale_C * (1 + 2 * chunk.z_loss * log_z_C)
                )
                # The label's share, less 1: computed in fp32, where it may be close to 0.
                share_C = (label_logit_C - log_z_C).exp() * (1 + 2 * chunk.z_loss * log_z_C) - 1
                other_C = by_logits_CV.gather(-1, index_C1).squeeze(-1)  # where the label is not
                # If another rank has the label, index_C1 is any row, which keeps its share.
                label_C = (scale_C * share_C).to(other_C.dtype).where(local_C, other_C)
                by_logits_CV.scatter_(-1, index_C1, label_C.unsqueeze(-1))
                torch.mm(by_logits_CV, weight_VH, out=by_hidden_TH[part])
                add_product(by_weight_VH, by_logits_CV, hidden_CH)

        if differentiate:
            ctx.save_for_backward(by_hidden_TH, by_weight_VH)
        ctx.mark_non_differentiable(sums)
        # Over all labels, counted or not, as `StepResult` says.
        return (sums.sum() / num_labels).float(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        # Backward comes once, so the saved tensors may be scaled in place.
        by_hidden_TH, by_weight_VH = (saved.mul_(gradient) for saved in ctx.saved_tensors)
        return by_hidden_TH, by_weight_VH, None, None, None


def _rows_of_this_rank(labels_C: Tensor, num_rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return which labels are rows of this rank, and the row of each, or a row, [C, 1]."""
    labels_C = labels_C - (0 if group is None else group.rank()) * num_rows
    local_C = (labels_C >= 0) & (labels_C < num_rows)
    return local_C, labels_C.clamp(0, num_rows - 1).unsqueeze(-1)


def _normalizer(
    logits_CV: Tensor, local_C: Tensor, index_C1: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """Return logsumexp(logits) and the label's logit over all ranks' vocabulary, [C] in fp32."""
    log_z_C = _log_sum_exp(logits_CV)
    # 0 on ranks that do not have the row of the label: the sum over ranks is its logit.
    label_logit_C = logits_CV.gather(-1, index_C1).squeeze(-1).float() * local_C
    if group is None:
        return log_z_C, label_logit_C
    # logsumexp over ranks, shifted by the largest so that no exp overflows.
    max_C = log_z_C.clone()
    dist.all_reduce(max_C, dist.ReduceOp.MAX, group)
    both = torch.stack([(log_z_C - max_C).exp(), label_logit_C])
    dist.all_reduce(both, group=group)
    return max_C + both[0].log(), both[1]


@compiled_on_gpu
def _log_sum_exp(logits_CV: Tensor) -> Tensor:
    return torch.logsumexp(logits_CV.float(), -1)


@compiled_on_gpu
def _shares(logits_CV: Tensor, log_z_C: Tensor, scale_C: Tensor) -> Tensor:
    """Return softmax(logits) times the scale of each token, in the dtype of the logits."""
    shares_CV = (logits_CV.float() - log_z_C.unsqueeze(-1)).exp_()
    return shares_CV.mul_(scale_C.unsqueeze(-1)).to(logits_CV.dtype)
