"""Transforms learned block by block, by gradient descent on a decoder block's own output error.

The error is that of the block with cast inputs and rounded weights (`casts.linear`), relative to
its full-precision output on the same inputs. The papers learn on the model's loss (SpinQuant,
OSTQuant) or on a block's error (FlatQuant). In front of every linear a transform is exact on any
architecture, so that blocks have no transform in common; the names say `-blockwise`.

`measuring.sequential` calls `learn_transforms` before it rounds a block. Weights are rounded to
nearest while transforms are learned, also for GPTQ, and the KV cache is not cast.

Every transform is T = D H M, with the random Hadamard transform H of
`rhad` (`hadamard`), and begins as H alone:

- SpinQuant (arXiv:2405.16406) learns a rotation by the Cayley transform. Here M is block-diagonal,
  with one rotation per 128 features at most. The paper learns whole matrices [I, I], and those of
  the residual stream and of the heads alone; a step of a whole Cayley transform takes I^3.
- OSTQuant (arXiv:2501.13987) learns scales D besides, of every feature.
- FlatQuant (arXiv:2410.09426) learns scales and a Kronecker product M of two invertible matrices.
  The paper learns clipping thresholds too, which are left out here.

Blocks, since they lose least: on a layer of 256 inputs with planted outliers the error of W4A4 on
tokens that nothing was learned on falls from 0.020 (H) to 0.010 with one block of 256, 0.011 with
two of 128, 0.013 with eight of 32, and 0.016 with a Kronecker product of two rotations. With 1,024
inputs blocks of 128 reach what one of 1,024 does (0.018 of 0.027).

Rounding has a gradient straight through it, but not past the scale. It takes x to s c with codes
c = round(x / s). Its derivative is 0 almost everywhere. Straight through (Bengio et al. 2013,
arXiv:1308.3432) takes that of round for 1, which gives dQ = dx + (Q - x) ds / s: a larger scale
makes all errors of its group larger. The scale follows max|x| of the group, and to make that
smaller is what a rotation is for. Without the second term the rotations learn nothing
(`tests/quant_eval/test_learned.py`).

Shapes: S sequences that are learned on, B of a batch, L tokens of a sequence, D hidden features, O
output features, I input features, G blocks or groups of K of them, A and B the factors of I = A B.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import orthogonal

from base.errors import UserError
from base.ranks import ALONE, Ranks
from quant_eval.casts.activations import activation_cast
from quant_eval.casts.linear import CastLinear, share_inputs
from quant_eval.model.activations import Activations
from quant_eval.model.streamed import Block, Context
from quant_eval.quantizer import GridSpec, QuantSpec
from quant_eval.rotations import RotationName
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.steps import Blocks, Diagonal, Kronecker, Transform, TransformStep
from train.model.families import SITES

SAMPLE_SEQUENCES = 8  # of the calibration text
BATCH_TOKENS = 4096  # at most, unless one sequence has more
LARGEST_BLOCK = 128  # features that a learned rotation mixes, at most


class Scales(nn.Module):
    """A positive factor of each feature, by its logarithm."""

    rate = 0.03  # of learning

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logarithms_I = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def step(self) -> TransformStep:
        """Return them with their gradient."""
        return Diagonal(self.logarithms_I.exp())


class Rotations(nn.Module):
    """An orthogonal matrix of each block, by the Cayley transform in float64."""

    rate = 0.01
    blocks_GKK: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        size = max(size for size in range(1, LARGEST_BLOCK + 1) if width % size == 0)
        identity_KK = torch.eye(size, dtype=torch.float64)
        # Begins as the identity, so that T begins as H alone.
        self.blocks_GKK = nn.Parameter(identity_KK.repeat(width // size, 1, 1))
        orthogonal(self, "blocks_GKK", orthogonal_map="cayley")

    def step(self) -> TransformStep:
        """Return them with their gradient."""
        return Blocks(self.blocks_GKK)


class Factors(nn.Module):
    """Two matrices whose Kronecker product is invertible, of sizes as equal as possible."""

    rate = 0.01

    def __init__(self, width: int) -> None:
        super().__init__()
        left = min(size for size in range(1, width + 1) if size**2 >= width and width % size == 0)
        right = width // left
        self.left_AA = nn.Parameter(torch.zeros(left, left, dtype=torch.float64))
        self.right_BB = nn.Parameter(torch.zeros(right, right, dtype=torch.float64))

    def step(self) -> TransformStep:
        """Return the product with its gradient.

        The parameters are differences to the identity.
        """
        return Kronecker(_plus_identity(self.left_AA), _plus_identity(self.right_BB))


LearnedPart = Scales | Rotations | Factors
FACTORS: dict[RotationName, tuple[type[Scales] | None, type[Rotations] | type[Factors]]] = {
    "spinquant-blockwise": (None, Rotations),
    "ostquant-blockwise": (Scales, Rotations),
    "flatquant-blockwise": (Scales, Factors),
}


class Learnable(nn.Module):
    """T = D H M of one site.

    Args of the constructor:
        rotation: which of FACTORS.
        width: of the site; it has a Hadamard matrix (`placement.places_of`).
        seed: of the random signs of H.
    """

    def __init__(self, rotation: RotationName, width: int, seed: Sequence[int]) -> None:
        super().__init__()
        scales, mixing = FACTORS[rotation]
        self._start = nn.ModuleList(hadamard_steps(width, seed=seed))
        self.scales = scales(width) if scales else None
        self.mixing = mixing(width)

    def transform(self) -> Transform:
        """Return T at the present values, with their gradient where gradients are kept."""
        before = [self.scales.step()] if self.scales else []
        start = [step for step in self._start if isinstance(step, TransformStep)]
        return Transform(*before, *start, self.mixing.step())

    def parts(self) -> list[LearnedPart]:
        """Return what is learned."""
        return [self.scales, self.mixing] if self.scales else [self.mixing]


def _plus_identity(matrix_KK: Tensor) -> Tensor:
    return matrix_KK + torch.eye(len(matrix_KK), dtype=matrix_KK.dtype, device=matrix_KK.device)


class _StraightThrough(torch.autograd.Function):
    """The rounded numbers as they are, with the gradient of rounding at a scale of max|x|."""

    @staticmethod
    def forward(context: Any, x: Tensor, rounded: Tensor, size: int) -> Tensor:
        x_GK = x.reshape(-1, size)
        largest_G1, where_G1 = x_GK.abs().max(1, keepdim=True)
        # dQ / ds x ds / dmax|x| = (Q - x) / max|x|, since the scale is proportional to max|x|.
        errors_GK = (rounded.reshape(-1, size) - x_GK).div_(largest_G1)
        errors_GK.masked_fill_(largest_G1 == 0, 0.0)  # a group of zeros
        context.save_for_backward(errors_GK, where_G1, x_GK.gather(1, where_G1).sign())
        return rounded

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        errors_GK, where_G1, signs_G1 = context.saved_tensors
        gradient_GK = gradients[0].reshape(errors_GK.shape)
        # Of max|x| only the largest entry has a derivative, which is its sign.
        slope_G1 = (gradient_GK * errors_GK).sum(1, keepdim=True) * signs_G1
        return gradient_GK.scatter_add(1, where_G1, slope_G1).view_as(gradients[0]), None, None


def straight_through(x: Tensor, rounded: Tensor, size: int) -> Tensor:
    """Return `rounded`, as a function of x.

    Args:
        x: any shape.
        rounded: what x is rounded to; constant.
        size: successive numbers of x that share a scale in proportion to their max|x|, as on
            min-max grids. Where a format has other scales that is an approximation.

    Example: the largest, -2, moves the scale too, by which its error of -0.5 grows or shrinks.
        >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> straight_through(x, torch.tensor([1.0, -2.5]), size=2).sum().backward()
        >>> x.grad.tolist()
        [1.0, 1.25]
    """
    result: Tensor = _StraightThrough.apply(x, rounded, size)
    return result


def rounded_weight(weight_OI: Tensor, spec: QuantSpec) -> Tensor:
    """Return Q_w of fp32 weights that read the same input, by rounding to nearest.

    UserError if they are not finite.

    Example: 3 bits have 7 steps, here from -3.5 to 3.5; the points are -4 to 3.
        >>> from quant_eval.specs import parse_spec
        >>> weight_OI = torch.tensor([[1.2, -3.5]])
        >>> rounded_weight(weight_OI, parse_spec("rtn-b3-g2")).tolist()
        [[1.0, -4.0]]
    """
    if not isinstance(spec, GridSpec):
        return weight_OI  # weights stay as they are: no other quantizer takes a transform
    with torch.no_grad():
        rounded_OI = round_to_nearest(weight_OI, spec).dense()
    return straight_through(weight_OI, rounded_OI, spec.group_size or weight_OI.shape[1])


class StraightThroughCast(nn.Module):
    """The cast Q_a of a spec, with a gradient.

    The range of a static cast is that of the present batch.
    """

    def __init__(self, spec: QuantSpec, width: int, name: str) -> None:
        super().__init__()
        self._spec, self._width, self._name = spec, width, name

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs [..., I] cast and back, in their dtype."""
        cast = activation_cast(self._spec, self._width)
        if cast is None:
            return x
        if cast.needs_range:
            cast.observe(x)
            cast.fix(self._name)
        group = cast.args.group_size if cast.args else None
        # The numbers that share a scale: all, a group of a token, or a token.
        size = x.numel() if cast.is_static else group or self._width
        with torch.no_grad():
            rounded = cast(x)
        return straight_through(x, rounded, size)


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
    counts = [sum(size for size, _ in shares) for shares in shapes]
    if 0 in counts:
        raise UserError(
            f"{sum(counts)} calibration sequences are too few for {ranks.size} ranks to learn"
            " transforms on; give more of them, or start fewer ranks"
        )
    count, length = min(SAMPLE_SEQUENCES, sum(counts)), shapes[0][0][1]
    sample_SLD = torch.zeros(count, length, width, device=ranks.device)
    # Ranks hold successive shares, so sequences of this one begin after those of lower ranks.
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
    context: Context,
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
        context: what the block needs besides, for sequences of their length.
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
        trial = Trial(block, learnables, spec, batches, context)
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
    # One evaluation more than steps: the values after the last step are judged too.
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
        context: Context,
    ) -> None:
        self.block, self._batches, self._context = block.copy(), batches, context
        with torch.no_grad():
            self._targets = [block(x_BLD, context) for x_BLD in batches]
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
        for x_BLD, target_BLD in zip(self._batches, self._targets, strict=True):
            error += self._error(x_BLD, target_BLD)
            for group in self._groups:
                group.add_gradients()
        for group in self._groups:
            group.end()
        return error

    def _error(self, x_BLD: Tensor, target_BLD: Tensor) -> float:
        difference_BLD = self.block(x_BLD, self._context).float() - target_BLD.float()
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
        cast = StraightThroughCast(spec, _width(linears), next(iter(linears)))
        transform = learnable.transform()
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
