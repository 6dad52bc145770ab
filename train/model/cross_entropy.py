"""The two passes of a loss over the logits of a chunk of tokens, as one Triton kernel.

Written out in torch they are three reads and a write of the logits and a copy of them, in some
thirty kernels; here two reads, the second out of the cache, and a write in their place. Triton
comes with torch for CUDA alone, so only `train.model.losses` imports this, where logits are on a
GPU. docs/design/step-time.md compares it with losses that keep no logits.

Shapes: C tokens of a chunk, V rows of the vocabulary on this rank.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Two programs of so many warps fill a multiprocessor of a GPU. The rows of all programs, 264 of
# 200 kB on an H100, are then about as large as its cache, from which they are read again.
BLOCK, WARPS = 16_384, 32


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    logits,
    labels,
    counted,
    statistics,
    num_columns,
    scale,
    z_loss,
    REDUCE: tl.constexpr,
    DIFFERENTIATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce the row of a token, write its gradient over it, or both."""
    token, num_tokens = tl.program_id(0), tl.num_programs(0)
    row = logits + token.to(tl.int64) * num_columns
    label = tl.load(labels + token)
    block = tl.arange(0, BLOCK)

    # logsumexp, rescaled to the largest logit so far; the label's logit is 0 on other ranks.
    if REDUCE:
        is_here = (label >= 0) & (label < num_columns)
        label_logit = tl.load(row + label, mask=is_here, other=0.0).to(tl.float32)
        largest, total = float("-inf"), 0.0
        for start in range(0, num_columns, BLOCK):
            columns = start + block
            x = tl.load(row + columns, mask=columns < num_columns, other=float("-inf"))
            x = x.to(tl.float32)
            larger = tl.maximum(largest, tl.max(x, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
            largest = larger
        log_z = largest + tl.log(total)
        tl.store(statistics + token, log_z)
        tl.store(statistics + num_tokens + token, label_logit)
    else:
        log_z = tl.load(statistics + token)
        label_logit = tl.load(statistics + num_tokens + token)

    # That of log Z - logit + z (log Z)^2: softmax (1 + 2 z log Z), less 1 at the label.
    if DIFFERENTIATE:
        tl.debug_barrier()  # no warp writes before all have read the label's logit
        scale = tl.load(counted + token).to(tl.float32) * scale
        slope = 1 + 2 * z_loss * log_z
        at_label = (tl.exp(label_logit - log_z) * slope - 1) * scale
        for start in range(0, num_columns, BLOCK):
            columns = start + block
            x = tl.load(row + columns, mask=columns < num_columns).to(tl.float32)
            gradient = tl.where(columns == label, at_label, tl.exp(x - log_z) * (slope * scale))
            tl.store(row + columns, gradient.to(logits.dtype.element_ty), columns < num_columns)


def pass_over_rows(
    logits_CV: Tensor,
    labels_C: Tensor,
    counted_C: Tensor,
    statistics_2C: Tensor,
    *,
    scale: float,
    z_loss: float,
    reduce: bool,
    differentiate: bool,
) -> None:
    """Reduce the logits of each token to statistics, write the loss's gradient over them, or both.

    Args:
        logits_CV: contiguous; their gradient afterwards, where `differentiate`.
        labels_C: columns of the logits; those outside are on other ranks.
        counted_C: the labels that enter the loss.
        statistics_2C: logsumexp of the logits and the label's logit, 0 if that is on another rank,
            in fp32: written where `reduce`, else read, over all ranks.
        scale: of every counted label in the loss.
        z_loss: the factor of z-loss.
        reduce: write the statistics.
        differentiate: write the gradient of cross-entropy and z-loss, both times `scale`.
    """
    kernel: Any = _rows[(len(logits_CV),)]
    kernel(
        logits_CV,
        labels_C,
        counted_C,
        statistics_2C,
        logits_CV.shape[1],
        scale,
        z_loss,
        REDUCE=reduce,
        DIFFERENTIATE=differentiate,
        BLOCK=min(BLOCK, triton.next_power_of_2(logits_CV.shape[1])),
        num_warps=WARPS,
    )
