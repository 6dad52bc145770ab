"""Cross-entropy and z-loss over a vocabulary that is split over tensor-parallel ranks.

Shapes: B sequences, S tokens, V vocabulary rows of this rank.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor


def cross_entropy_and_log_normalizer(
    logits_BSV: Tensor, labels_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -log softmax(logits)[label] and log Z = logsumexp(logits), [B, S] fp32, in nats.

    Only per-token numbers travel between ranks. First-order gradients are exact; second ones are
    not (no part of megatron-core differentiates twice through a reduction).
    """
    logits_BSV = logits_BSV.float()
    num_rows = logits_BSV.shape[-1]
    local_labels_BS = labels_BS - parallel_state.get_tensor_model_parallel_rank() * num_rows
    is_local_BS = (local_labels_BS >= 0) & (local_labels_BS < num_rows)
    index_BS1 = local_labels_BS.clamp(0, num_rows - 1).unsqueeze(-1)
    label_logit_BS = logits_BSV.gather(-1, index_BS1).squeeze(-1) * is_local_BS
    log_z_BS = torch.logsumexp(logits_BSV, -1)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        max_BS = log_z_BS.detach().clone()
        dist.all_reduce(max_BS, dist.ReduceOp.MAX, group)
        # mcore reduces in place, unseen by autograd, and exp() keeps its output for backward: copy.
        share_BS = (log_z_BS - max_BS).exp().clone()
        log_z_BS = max_BS + reduce_from_tensor_model_parallel_region(share_BS).log()
        label_logit_BS = reduce_from_tensor_model_parallel_region(label_logit_BS)
    return log_z_BS - label_logit_BS, log_z_BS
