"""Products shared out over ranks, with results that do not depend on how many there are.

Ranks that hold whole models take pairs in turns; ranks that hold shards of one model take every
product together.

Shapes: B sequences of a batch, S positions, p parameters of this rank, R rows, C columns.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from base.ranks import Ranks
from curvature.products.exact import DualHessian, Quadratic
from curvature.products.model import CurvedModel


class Sharing:
    """The ranks of a measurement and whether they share one model."""

    def __init__(self, ranks: Ranks, sharded: bool) -> None:
        self.ranks, self._sharded = ranks, sharded

    def quadratics(
        self,
        quadratic: Callable[[int], Quadratic],
        count: int,
        names: Collection[str],
        on_item: Callable[[], None],
    ) -> list[Quadratic]:
        """Return `quadratic` of 0..count-1 on every rank.

        `names` are those of the tensors. `on_item` is called for every index that is complete, as
        far as this rank knows.
        """
        first, turns = (0, 1) if self._sharded else (self.ranks.rank, self.ranks.size)
        # The rows of other ranks stay 0, so the sum over the ranks puts all rows together.
        rows_RC = torch.zeros(count, 2 + len(names), dtype=torch.float64)
        for row in range(first, count, turns):
            loss, slope, dots = quadratic(row)
            rows_RC[row] = torch.tensor([loss, slope, *dots.values()], dtype=torch.float64)
            for _ in range(min(turns, count - row)):
                on_item()
        # Ranks with shards of one model took every product together: each has all rows already.
        if not self._sharded:
            self.ranks.sum(rows_RC)
        return [
            Quadratic(loss, slope, dict(zip(names, dots, strict=True)))
            for loss, slope, *dots in rows_RC.tolist()
        ]

    def mean_loss(self, model: CurvedModel, batches_BS1: Sequence[Tensor]) -> float:
        """Return the mean loss over all sequences of the batches, nats per token."""
        total = sum(len(tokens_BS1) for tokens_BS1 in batches_BS1)
        with torch.no_grad():
            summed = sum(
                model.loss(tokens_BS1).value * len(tokens_BS1) / total
                for tokens_BS1 in self._own(batches_BS1)
            )
        loss = torch.tensor(summed, dtype=torch.float64)
        return float(loss if self._sharded else self.ranks.sum(loss))

    def mean_product(
        self, hessian: DualHessian, batches_BS1: Sequence[Tensor], on_product: Callable[[], None]
    ) -> Callable[[Tensor], Tensor]:
        """Return v_p -> (Hv)_p of the mean loss over all sequences, of batches of any sizes."""
        total = sum(len(tokens_BS1) for tokens_BS1 in batches_BS1)

        def product(v_p: Tensor) -> Tensor:
            share_BS1 = self._own(batches_BS1)
            share = sum(map(len, share_BS1)) / total
            # A rank without a batch joins the sum with 0.
            hv_p = hessian.mean_product(share_BS1, v_p).hv_p if share_BS1 else torch.zeros_like(v_p)
            # hv_p is of the mean over this rank's sequences; weighted so, the ranks' sum is of all.
            if share < 1:
                hv_p.mul_(share)
            on_product()
            return hv_p if self._sharded else self.ranks.sum(hv_p)

        return product

    def _own(self, batches_BS1: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the batches that this rank works on."""
        return batches_BS1 if self._sharded else batches_BS1[self.ranks.rank :: self.ranks.size]
