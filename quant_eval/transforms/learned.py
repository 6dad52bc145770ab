"""Transforms learned block by block, by gradient descent on a decoder block's own output error.

The error is that of the block with cast inputs and rounded weights (`casts.linear`), relative to
its full-precision output on the same inputs. The papers learn on the model's loss (SpinQuant,
OSTQuant) or on a block's error (FlatQuant). In front of every linear a transform is exact on any
architecture, so that blocks have no transform in common; the names say `-blockwise`.

`measuring.sequential` calls `learn_transforms` before it rounds a block. Weights are rounded to
nearest while transforms are learned, also for GPTQ, and the KV cache is not cast.

Shapes: S sequences that are learned on, B of a batch, L tokens of a sequence, D hidden features, O
    output features, I input features.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from base.errors import UserError
from base.ranks import ALONE, Ranks
from quant_eval.casts.linear import CastLinear, share_inputs
from quant_eval.model.activations import Activations
from quant_eval.model.families import SITES
from quant_eval.model.streamed import Block
from quant_eval.specs import QuantSpec
from quant_eval.transforms.learnable import Learnable
from quant_eval.transforms.steps import Transform
from quant_eval.transforms.straight_through import StraightThroughCast, rounded_weight

Contexts = Sequence[Mapping[str, Any]]
SAMPLE_SEQUENCES = 8  # of the calibration text
BATCH_TOKENS = 4096  # at most, unless one sequence has more


def sample(inputs: Activations, width: int, dtype: torch.dtype, ranks: Ranks) -> list[Tensor]:
    """Return the first sequences of the calibration text in batches [B, L, D], on every rank.

    They are the same bits on any number of ranks.

    Args:
        inputs: this rank's share of the sequences, all of one length.
        width: D.
        dtype: of the inputs.
        ranks: all of them have to call it.

    Raises:
        UserError: a rank has no sequence.
    """
    shapes = ranks.gather_values(inputs.shapes)
    counts = [sum(size for size, _ in own) for own in shapes]
    if 0 in counts:
        raise UserError(
            f"{sum(counts)} calibration sequences are too few for {ranks.size} ranks to learn"
            " transforms on; give more of them, or start fewer ranks"
        )
    count, length = min(SAMPLE_SEQUENCES, sum(counts)), shapes[0][0][1]
    sample_SLD = torch.zeros(count, length, width, device=ranks.device)
    row = sum(counts[: ranks.rank])
    for index, (size, _) in enumerate(inputs.shapes):
        if row < count:
            sample_SLD[row : row + size] = inputs.read(index)[: count - row]
        row += size
    # each sequence is 0 on all ranks but one
    return list(ranks.sum(sample_SLD).to(dtype).split(max(1, BATCH_TOKENS // length)))


def learn_transforms(
    block: Block,
    batches: Sequence[Tensor],
    contexts: Contexts,
    spec: QuantSpec,
    seed: int,
    ranks: Ranks = ALONE,
) -> dict[str, Transform]:
    """Return the learned transform of each site of a block.

    Adam takes `spec.iterations` steps on all of the inputs, with rates that fall linearly to 0. The
    values of the least error are returned, those before the first step included, so on these
    inputs nothing is worse than `rhad`.

    Args:
        block: in full precision; it stays as it is.
        batches: x [B, L, D], the same on every rank; see `sample`.
        contexts: per batch, what the block needs besides.
        spec: what is cast and how weights are rounded.
        seed: of the random signs at the start. Nothing else is random.
        ranks: all learn the same; the values of rank 0 are everyone's, since GPUs may differ.

    Raises:
        UserError: an input, a weight or the error is not finite.
    """
    assert spec.rotation is not None
    assert spec.iterations is not None
    device = batches[0].device
    learnables = {
        site: Learnable(spec.rotation, _width(linears), (seed, SITES.index(site))).to(device)
        for site, linears in zip(SITES, block.linears(), strict=True)
    }
    # attention's other kernels sum gradients in an order that changes from run to run on a GPU
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        trial = Trial(block, learnables, spec, batches, contexts)
        descend(nn.ModuleList(learnables.values()), trial, spec.iterations, ranks)
    with torch.no_grad():
        return {site: learnable.transform() for site, learnable in learnables.items()}


def descend(learnables: nn.ModuleList, trial: "Trial", iterations: int, ranks: Ranks) -> None:
    """Change the values to those of the least error."""
    parts = [part for each in learnables if isinstance(each, Learnable) for part in each.parts()]
    optimizer = torch.optim.Adam(
        [{"params": [*part.parameters()], "lr": part.rate} for part in parts], betas=(0.9, 0.99)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, iterations)

    values = [value for part in parts for value in part.parameters()]
    least, best = math.inf, list[Tensor]()
    for step in range(iterations + 1):
        optimizer.zero_grad()
        error = trial.error()
        if not math.isfinite(error):
            raise UserError(
                f"{trial.block.prefix}: its output error is {error} at step {step}; check the"
                " checkpoint with 'python -m ckpt_tools inspect --verify'"
            )
        if error < least:
            least, best = error, [value.detach().clone() for value in values]
        if step < iterations:
            optimizer.step()
            schedule.step()
    for value, best_value in zip(values, best, strict=True):
        ranks.broadcast(best_value, 0)
        value.data.copy_(best_value)


class Trial:
    """A copy of a block whose linears are cast and rounded with transforms that change."""

    def __init__(
        self,
        block: Block,
        learnables: Mapping[str, Learnable],
        spec: QuantSpec,
        batches: Sequence[Tensor],
        contexts: Contexts,
    ) -> None:
        self.block, self._batches, self._contexts = block.copy(), batches, contexts
        with torch.no_grad():
            self._targets = [
                block(x_BLD, dict(context))
                for x_BLD, context in zip(batches, contexts, strict=True)
            ]
        self._target_square = sum(float(target.float().square().sum()) for target in self._targets)
        self._groups = [
            _Group(self.block, linears, learnable, spec)
            for linears, learnable in zip(self.block.linears(), learnables.values(), strict=True)
        ]

    def error(self) -> float:
        """Return the squared error over the squared output, and add its gradient."""
        for group in self._groups:
            group.begin()
        error = 0.0
        for part in zip(self._batches, self._contexts, self._targets, strict=True):
            error += self._error(*part)
            for group in self._groups:
                group.add_gradients()
        for group in self._groups:
            group.end()
        return error

    def _error(self, x_BLD: Tensor, context: Mapping[str, Any], target_BLD: Tensor) -> float:
        difference_BLD = self.block(x_BLD, dict(context)).float() - target_BLD.float()
        error = difference_BLD.square().sum() / self._target_square
        error.backward(retain_graph=True)  # all batches share the graph of the transforms
        return float(error.detach())


class _Group:
    """The linears of a site, replaced in a copy of their block.

    Rounded weights are leaves of the batches' graphs, so their own graph is traversed once per
    step.
    """

    def __init__(
        self, block: Block, linears: Mapping[str, nn.Linear], learnable: Learnable, spec: QuantSpec
    ) -> None:
        self._learnable, self._spec = learnable, spec
        self._weight_OI = torch.cat([linear.weight.float() for linear in linears.values()])
        self._sizes = [linear.out_features for linear in linears.values()]
        self._dtype = next(iter(linears.values())).weight.dtype
        transform, cast = learnable.transform(), StraightThroughCast(spec, _width(linears))
        self._linears = [
            CastLinear(linear.weight, linear.bias, transform, cast) for linear in linears.values()
        ]
        share_inputs(self._linears)
        for name, linear in zip(linears, self._linears, strict=True):
            block.module.set_submodule(name.removeprefix(f"{block.prefix}."), linear)

    def begin(self) -> None:
        """Take the transform of the present values."""
        transform = self._learnable.transform()
        self._linears[0].inputs.transform = transform  # of all linears
        self._rounded_OI = rounded_weight(transform.weight(self._weight_OI), self._spec)
        self._gradient_OI = torch.zeros_like(self._rounded_OI)
        parts = self._rounded_OI.detach().to(self._dtype).split(self._sizes)
        for linear, part_OI in zip(self._linears, parts, strict=True):
            linear.weight = nn.Parameter(part_OI)

    def add_gradients(self) -> None:
        """Add a batch's gradients of the rounded weights, in fp32 whatever their precision."""
        self._gradient_OI += torch.cat([_gradient(linear.weight) for linear in self._linears])
        for linear in self._linears:
            linear.weight.grad = None

    def end(self) -> None:
        """Propagate the gradients of the rounded weights to the values."""
        self._rounded_OI.backward(self._gradient_OI)
        del self._rounded_OI, self._gradient_OI


def _gradient(weight_OI: Tensor) -> Tensor:
    assert weight_OI.grad is not None
    return weight_OI.grad


def _width(linears: Mapping[str, nn.Linear]) -> int:
    return next(iter(linears.values())).in_features
