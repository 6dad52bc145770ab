"""The head and both losses, in chunks of tokens: the logits of a microbatch never exist at once.

The heads of both engines call this: `train.megatron.loss` and `train.deepspeed.model`.

Shapes: T tokens, C tokens of a chunk, H hidden size, V rows of the vocabulary on this rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from base.gpus import has_compiler
from train.model.accumulation import add_product, sums_like
from train.model.chunks import CPU_CHUNK_TOKENS, LOSS_CHUNK_TOKENS
from train.model.elementwise import Group


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
        num_labels = len(targets.labels_T)
        chunk_tokens = CPU_CHUNK_TOKENS if hidden_TH.is_cpu else LOSS_CHUNK_TOKENS
        statistics_2T = torch.empty(2, num_labels, dtype=torch.float32, device=hidden_TH.device)
        if differentiate:
            by_hidden_TH, by_weight_VH = torch.empty_like(hidden_TH), sums_like(weight_VH)

        # Gradients of a chunk are used while its logits are there.
        for start in range(0, num_labels, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            chunk = Targets(targets.labels_T[part], targets.counted_T[part], targets.z_loss)
            hidden_CH = hidden_TH[part]
            logits_CV = hidden_CH @ weight_VH.t()
            statistics_2T[:, part], by_logits_CV = pass_over(logits_CV)(
                logits_CV, chunk, num_labels, group, differentiate
            )
            if by_logits_CV is not None:
                torch.mm(by_logits_CV, weight_VH, out=by_hidden_TH[part])
                add_product(by_weight_VH, by_logits_CV, hidden_CH)

        # Both losses, which on a GPU are few kernels for all tokens.
        log_z_T, label_logit_T = statistics_2T
        losses_2T = torch.stack([log_z_T - label_logit_T, targets.z_loss * log_z_T.square()])
        losses_2T = losses_2T.where(targets.counted_T, 0)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden_TH.device)
        for losses_2C in losses_2T.split(CPU_CHUNK_TOKENS if hidden_TH.is_cpu else num_labels, 1):
            sums += torch.stack([losses_C.double().sum() for losses_C in losses_2C])

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


def pass_over(logits_CV: Tensor) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return what computes a chunk's losses: on a GPU a kernel, if Triton has its C compiler."""
    return _fused if logits_CV.is_cuda and has_compiler() else _line_by_line


def _line_by_line(
    logits_CV: Tensor, chunk: Targets, num_labels: int, group: Group, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """Return logsumexp and the label's logit, [2, C] in fp32, and the gradient by logits."""
    local_C, index_C1 = _rows_of_this_rank(chunk.labels_T, logits_CV.shape[1], group)
    log_z_C = torch.logsumexp(logits_CV.float(), -1)
    # 0 on ranks that do not have the row of the label: the sum over ranks is its logit.
    label_logit_C = logits_CV.gather(-1, index_C1).squeeze(-1).float() * local_C
    log_z_C, label_logit_C = _over_ranks(log_z_C, label_logit_C, group)
    statistics_2C = torch.stack([log_z_C, label_logit_C])
    if not differentiate:
        return statistics_2C, None

    # That of log Z - logit + z (log Z)^2: softmax (1 + 2 z log Z), less 1 at the label.
    scale_C = chunk.counted_T / num_labels
    factor_C = scale_C * (1 + 2 * chunk.z_loss * log_z_C)
    shares_CV = (logits_CV.float() - log_z_C.unsqueeze(-1)).exp_()
    by_logits_CV = shares_CV.mul_(factor_C.unsqueeze(-1)).to(logits_CV.dtype)
    # The label's share, less 1: computed in fp32, where it may be close to 0.
    share_C = (label_logit_C - log_z_C).exp() * (1 + 2 * chunk.z_loss * log_z_C) - 1
    other_C = by_logits_CV.gather(-1, index_C1).squeeze(-1)  # where the label is not
    # If another rank has the label, index_C1 is any row, which keeps its share.
    label_C = (scale_C * share_C).to(other_C.dtype).where(local_C, other_C)
    by_logits_CV.scatter_(-1, index_C1, label_C.unsqueeze(-1))
    return statistics_2C, by_logits_CV


def _fused(
    logits_CV: Tensor, chunk: Targets, num_labels: int, group: Group, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the same by a kernel that writes the gradient over the logits, or by two over ranks.

    Ranks reduce their rows of the vocabulary between them.
    """
    from train.model.cross_entropy import pass_over_rows  # Triton, which a CPU's torch has not

    labels_C = chunk.labels_T
    if group is not None:
        labels_C = labels_C - group.rank() * logits_CV.shape[1]
    statistics_2C = torch.empty(2, len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    run = partial(
        pass_over_rows,
        logits_CV,
        labels_C,
        chunk.counted_T,
        scale=1 / num_labels,
        z_loss=chunk.z_loss,
    )
    run(statistics_2C, reduce=True, differentiate=differentiate and group is None)
    if group is not None:
        log_z_C, label_logit_C = statistics_2C
        statistics_2C = torch.stack(_over_ranks(log_z_C, label_logit_C, group))
        if differentiate:
            run(statistics_2C, reduce=False, differentiate=True)
    return statistics_2C, logits_CV if differentiate else None


def _rows_of_this_rank(labels_C: Tensor, num_rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return which labels are rows of this rank, and the row of each, or a row, [C, 1]."""
    labels_C = labels_C - (0 if group is None else group.rank()) * num_rows
    local_C = (labels_C >= 0) & (labels_C < num_rows)
    return local_C, labels_C.clamp(0, num_rows - 1).unsqueeze(-1)


def _over_ranks(log_z_C: Tensor, label_logit_C: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return logsumexp and the label's logit over all ranks' vocabulary, of those of this rank."""
    if group is None:
        return log_z_C, label_logit_C
    # logsumexp over ranks, shifted by the largest so that no exp overflows.
    max_C = log_z_C.clone()
    dist.all_reduce(max_C, dist.ReduceOp.MAX, group)
    both = torch.stack([(log_z_C - max_C).exp(), label_logit_C])
    dist.all_reduce(both, group=group)
    return max_C + both[0].log(), both[1]
