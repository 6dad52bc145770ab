"""The records of what an engine's hooks see of a forward pass.

`train.observing` sums up a `ForwardRecord`, and `train.rounding` rounds by a `LinearRecord`.

Shapes: B sequences, N heads, S tokens, D head size, Q queries, K keys, O outputs, I inputs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from base.hessian import InputHessian
from base.outlier_names import KINDS
from base.outliers import OutlierSums
from train.run.probe import short_name

INPUT, WEIGHT = KINDS
OUTLIERS = "outliers"  # begins the names of figures: outliers/input_kurtosis/LINEAR


class ForwardRecord:
    """Figures of forward passes on this rank by name, which an engine's hooks hand over.

    Names are those under which the figures are logged: NAME/layers.INDEX. A hook may add any.
    """

    def __init__(self) -> None:
        self.squares: dict[str, float] = defaultdict(float)
        self.elements: dict[str, float] = defaultdict(float)
        self.maxima: dict[str, float] = {}
        # By kind, and names of linears that have the same.
        self.outliers: dict[tuple[str, tuple[str, ...]], OutlierSums] = {}
        self.values: dict[str, float] = {}

    def root_mean_square(self, name: str, x: Tensor) -> None:
        """Take in elements of which the figure is the root mean square over all ranks."""
        self.squares[name] += x.float().square().sum(dtype=torch.float64).item()
        self.elements[name] += x.numel()

    def maximum(self, name: str, value: float) -> None:
        """Take in a value of which the figure is the largest over all ranks."""
        self.maxima[name] = max(value, self.maxima.get(name, -math.inf))

    def residual(self, layer: int, x: Tensor) -> None:
        """Take in the residual stream after a layer, or this rank's tokens of it."""
        self.root_mean_square(f"residual_rms/layers.{layer}", x)

    def attention(
        self, layer: int, query_BNSD: Tensor, key_BNSD: Tensor, documents_BS: Tensor | None
    ) -> None:
        """Take in queries and keys of some heads as they enter the attention."""
        largest = largest_logit(query_BNSD, key_BNSD, documents_BS)
        self.maximum(f"attention_logit_max/layers.{layer}", largest)

    def inputs(self, names: Sequence[str], x: Tensor) -> None:
        """Take in the tokens [..., I] that linears read, by the HF names of their weights.

        They are whole: where ranks share the inputs of a token, each takes in all of them.
        """
        sums = self.outliers.setdefault((INPUT, tuple(names)), OutlierSums(x.shape[-1], x.device))
        sums.add(x)

    def weight(self, name: str, pieces: Sequence[Tensor]) -> None:
        """Take in the weight of a linear: this rank's rows [O, I], whole, or all of them."""
        self.outliers[WEIGHT, (name,)] = OutlierSums.over(pieces)

    def has_weight(self, name: str) -> bool:
        """Return whether a weight was taken in, which counts once."""
        return (WEIGHT, (name,)) in self.outliers

    def summarize(self, add_up: Callable[[Tensor], object] = lambda _: None) -> None:
        """Replace the sums of outliers by their statistics, of a few bytes.

        `add_up` sums a tensor in place over the ranks that share the layers.
        """
        for (kind, names), sums in self.outliers.items():
            add_up(sums.sums_K)
            add_up(sums.squares_I)
            for statistic, value in sums.statistics().items():
                # Not defined where a row has only zeros, or zeros in half of its places.
                if math.isfinite(value):
                    key = f"{OUTLIERS}/{kind}_{statistic}"
                    self.values |= {f"{key}/{short_name(name)}": value for name in names}
        self.outliers.clear()


class LinearRecord(NamedTuple):
    """A whole linear, and the second moment of its inputs in forward passes."""

    weight_OI: Tensor  # as the model computes with it
    inputs: InputHessian

    @staticmethod
    def of(weight_OI: Tensor) -> "LinearRecord":
        """Return a record without inputs yet."""
        hessian = InputHessian(weight_OI.shape[1], weight_OI.device, weight_OI.dtype)
        return LinearRecord(weight_OI, hessian)


def largest_logit(
    query_BNSD: Tensor, key_BNSD: Tensor, documents_BS: Tensor | None, *, queries_at_once: int = 256
) -> float:
    """Return the largest q . k / sqrt(D) of a query and a key at or before it, in fp32.

    Where tokens are of `documents_BS`, numbers that differ, both are of one document.
    """
    heads, length, head_dim = query_BNSD.shape[1:]
    # With grouped queries, consecutive query heads share a key head.
    key_BNSD = key_BNSD.float().repeat_interleave(heads // key_BNSD.shape[1], 1)
    largest = -math.inf
    # By blocks of queries: the S x S logits of all heads at once would take too much memory.
    for start in range(0, length, queries_at_once):
        stop = min(start + queries_at_once, length)
        query_BNQD = query_BNSD[:, :, start:stop].float()
        logits_BNQK = query_BNQD @ key_BNSD[:, :, :stop].transpose(-1, -2)
        # Row i of a block is query start + i, which sees keys up to its own position.
        unseen = torch.ones_like(logits_BNQK[0, 0], dtype=torch.bool).triu(start + 1)
        if documents_BS is not None:
            queries, keys = documents_BS[:, start:stop], documents_BS[:, :stop]
            unseen = unseen | (queries[:, None, :, None] != keys[:, None, None, :])
        largest = max(largest, logits_BNQK.masked_fill_(unseen, -math.inf).max().item())
    return largest / math.sqrt(head_dim)
