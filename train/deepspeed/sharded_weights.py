"""Weights, optimizer states and gradients in DeepSpeed's ZeRO stage 3, which shards the model too.

Between passes every rank holds its part of each parameter alone; a module gathers its weights
before it computes and frees them afterwards. A part is as long on every rank: the last ones may end
in padding, or be nothing else. This file reaches into DeepSpeed's private members, as
`train.deepspeed.sharding` does for stages 1 and 2.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor

from train.deepspeed.sharding import ParameterRange, Partition
from train.engine import Change, LinearPart
from train.optimizers.stepping import GroupStepOptimizer


class OneGroupOptimizer(GroupStepOptimizer):
    """The optimizer as stage 3 steps it: once for each group, while the others are empty."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the group that has weights; the others keep their count of steps."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["params"]]
        super().step(closure)
        self.param_groups = groups


class ShardedWeights:
    """The parameters of a model, each cut evenly over the ranks: stage 3."""

    def __init__(self, optimizer: Any, parameters: dict[str, Tensor]) -> None:
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in parameters.items()}
        # Of each partition the group, and the place of its parameter there.
        self._places: list[tuple[int, int]] = []

    @property
    def owners(self) -> list[Tensor]:
        """Return the flat fp32 weights of every group, of which a rank may hold padding alone."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def partitions(self) -> list[Partition]:
        """Return what this rank holds: a range of every parameter long enough to have one."""
        optimizer, rank = self._optimizer, dist.get_rank()
        groups = zip(optimizer.fp16_groups, self.owners, strict=True)
        partitions, self._places = [], []
        for index, (parameters, owner) in enumerate(groups):
            start = 0
            for place, parameter in enumerate(parameters):
                size = parameter.partition_numel()
                first = rank * size
                length = min(size, parameter.ds_numel - first)
                if length > 0:
                    piece = ParameterRange(self._names[parameter], first, length)
                    partitions.append(Partition(owner, (piece,), start))
                    self._places.append((index, place))
                start += size
        return partitions

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of the whole gradient before clipping; infinite if it overflowed."""
        norm: Tensor = combine_grad_norm_groups(self._optimizer._get_norm_groups())
        return norm

    def gradients(self, partitions: list[Partition]) -> list[Tensor]:
        """Return the reduced gradients of the partitions; live."""
        averaged = self._optimizer.averaged_gradients
        return [
            averaged[group][place].flatten()[: partition.pieces[0].length]
            for partition, (group, place) in zip(partitions, self._places, strict=True)
        ]

    def set_gradients(self, values: list[Tensor]) -> None:
        """Replace the reduced gradients by values like those of `gradients`."""
        averaged = self._optimizer.averaged_gradients
        for value, (group, place) in zip(values, self._places, strict=True):
            averaged[group][place].view(-1)[: len(value)].copy_(value)

    def drop_gradients(self) -> None:
        """Forget the gradients of this step, as DeepSpeed does where they overflow."""
        self._optimizer.zero_grad()
        self._optimizer.averaged_gradients.update(dict.fromkeys(self._optimizer.averaged_gradients))

    def publish(self) -> None:
        """Copy this rank's weights to the model, which gathers them when it computes."""
        self._free()
        for group in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        self.settle()

    def settle(self) -> None:
        """Wait until the weights are written: they are gathered in a stream that does not wait."""
        get_accelerator().synchronize()

    def _free(self) -> None:
        """Leave no weight gathered: what a pass has kept would be out of date."""
        self._optimizer._partition_all_parameters()

    def whole(self, names: Sequence[str], mine: Collection[str]) -> dict[str, Tensor]:
        """Return copies of those of some parameters that this rank asks for.

        All ranks give the same names, and gather one after the other.
        """
        self._free()
        parameters = {name: parameter for parameter, name in self._names.items()}
        copies = {}
        for name in names:
            with GatheredParameters([parameters[name]]):
                if name in mine:
                    copies[name] = parameters[name].detach().clone()
        return copies

    def linears(self, names: frozenset[str]) -> Iterator[LinearPart]:
        """Yield linears by HF name, whole copies."""
        for parameter, name in self._names.items():
            if name in names:
                with GatheredParameters([parameter]):
                    yield LinearPart(name, (parameter.detach(),))

    def change_linears(self, names: frozenset[str], change: Change) -> Callable[[], None]:
        """Replace weights by what `change` returns; return what restores them."""
        self._free()
        saved: list[tuple[Tensor, Tensor]] = []
        for parameter, name in self._names.items():
            if name not in names:
                continue
            with GatheredParameters([parameter]):
                changed = change(LinearPart(name, (parameter.detach(),)), parameter.detach())
            if changed is not None:
                self._replace(parameter, changed, saved)
        self.settle()

        def restore() -> None:
            self._free()
            for part, exact in saved:
                part.copy_(exact)
            self.settle()

        return restore

    def _replace(self, parameter: Any, changed: Tensor, saved: list[tuple[Tensor, Tensor]]) -> None:
        """Write this rank's part of a changed parameter, and remember the exact one."""
        part = parameter.ds_tensor.detach()
        first = dist.get_rank() * part.numel()
        piece = changed.flatten()[first : first + part.numel()]
        part = part.flatten()[: piece.numel()]
        saved.append((part, part.clone()))
        part.copy_(piece)
