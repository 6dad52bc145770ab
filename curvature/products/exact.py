"""Exact Hessian-vector products by dual layers: L and g.v in one pass, Hv as the gradient of g.v.

The backward pass hands over every (Hv)_t when it is complete, so that v'Hv of billions of
parameters needs no vector in memory beside the weights and their tangents.

Shapes: B sequences of a batch, S positions of a sequence, p parameters of this rank, s entries of a
    picture.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from curvature.products.model import CurvedModel
from curvature.products.parameters import Parameters, Probe, add, dot, local
from curvature.products.sketch import CountSketch


class Quadratic(NamedTuple):
    """The loss and its first two derivatives along a vector v, on one microbatch.

    Attributes:
        loss: mean over the tokens, nats per token.
        slope: g.v with the gradient g of that loss.
        dots: v_t'(Hv)_t of every parameter tensor t by name; their sum is v'Hv.
    """

    loss: float
    slope: float
    dots: dict[str, float]


class HessianProduct(NamedTuple):
    """The loss, g.v and this rank's part of Hv."""

    loss: float
    slope: float
    hv_p: Tensor


class SketchedProduct(NamedTuple):
    """The loss and a picture of Hv (curvature/products/sketch.py)."""

    loss: float
    picture_s: Tensor


class DualHessian:
    """Products with the Hessian of the mean loss of sequences of S inputs and labels [B, S + 1].

    Example:
        hessian = DualHessian(CurvedModel(model, ranks=start("cpu")))
        loss, slope, dots = hessian.probed(tokens_BS1, Probe(seed=0, index=0))
        sample_of_the_trace = sum(dots.values())
    """

    def __init__(self, model: CurvedModel) -> None:
        self.parameters = model.parameters
        self._model = model

    def product(self, tokens_BS1: Tensor, v_p: Tensor) -> HessianProduct:
        """Return Hv, kept whole."""
        return self.mean_product([tokens_BS1], v_p)

    def mean_product(self, batches_BS1: Sequence[Tensor], v_p: Tensor) -> HessianProduct:
        """Return Hv of the mean loss over the sequences of several batches.

        The tangents are set once. Every gradient is added to Hv where that is, and dropped.
        """
        self._model.set_tangents(self.parameters.split(v_p).__getitem__)
        hv_p = self.parameters.zeros()
        parts = self.parameters.split(hv_p)
        loss = along = 0.0
        sequences = sum(map(len, batches_BS1))
        for tokens_BS1 in batches_BS1:
            # A batch's loss is the mean over its own sequences; its share makes it part of the
            # whole mean.
            share = len(tokens_BS1) / sequences
            batch_loss, slope = self._model.dual_loss(tokens_BS1)
            loss, along = loss + share * batch_loss, along + share * slope.value
            # The gradient of g.v by the weights is this batch's part of Hv.
            objective = slope.share * share
            collected(self.parameters, objective, lambda name, hv: add(parts[name], hv))
        return HessianProduct(loss, along, hv_p)

    def quadratic(self, tokens_BS1: Tensor, v_p: Tensor) -> Quadratic:
        """Return v_t'(Hv)_t of every tensor t, in bf16 with the rounded v on both sides."""
        return self._quadratic(tokens_BS1, self.parameters.split(v_p).__getitem__)

    def probed(self, tokens_BS1: Tensor, probe: Probe) -> Quadratic:
        """Return the same for a probe, which is drawn tensor by tensor where they are."""
        return self._quadratic(tokens_BS1, lambda name: self.parameters.signs(name, probe))

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Return the picture of Hv for the sketch's probe."""
        self._model.set_tangents(lambda name: self.parameters.signs(name, sketch.along))
        loss, slope = self._model.dual_loss(tokens_BS1)
        return SketchedProduct(loss, sketched_gradient(self.parameters, slope.share, sketch))

    def _quadratic(self, tokens_BS1: Tensor, direction: Callable[[str], Tensor]) -> Quadratic:
        self._model.set_tangents(direction)
        loss, slope = self._model.dual_loss(tokens_BS1)
        # v is read back from the model, rounded as the pass had it.
        dots = streamed(
            self.parameters, slope.share, lambda name, hv: dot(self._model.tangent(name), hv)
        )
        return Quadratic(loss, slope.value, dots)


def sketched_gradient(parameters: Parameters, objective: Tensor, sketch: CountSketch) -> Tensor:
    """Return the picture of an objective's gradient by all parameters, this rank's part."""
    return sketch.whole(collected(parameters, objective, sketch.part).__getitem__)


def streamed(
    parameters: Parameters, objective: Tensor, measure: Callable[[str, Tensor], Tensor]
) -> dict[str, float]:
    """Return a number of every tensor's gradient, summed over the ranks.

    `measure` returns a float64 scalar for a name and this rank's part of the gradient.
    """
    sums = collected(parameters, objective, measure)
    return parameters.total([sums[name] for name in parameters.weights])


def collected(
    parameters: Parameters, objective: Tensor, measure: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return `measure` of every name and gradient, without two gradients in memory at once."""
    results: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[[Tensor], None]:
        def hook(weight: Tensor) -> None:
            assert weight.grad is not None
            results[name] = measure(name, local(weight.grad))
            weight.grad = None

        return hook

    # Autograd calls them after the last contribution to a weight, FSDP2 after the reduction.
    hooks = [
        weight.register_post_accumulate_grad_hook(hook_of(name))
        for name, weight in parameters.weights.items()
    ]
    try:
        objective.backward()
    finally:
        # Hooks left by a failed pass would take the gradients of the next one.
        for hook in hooks:
            hook.remove()
    # A tensor that no hook saw would keep Hv = 0 in `mean_product`, unnoticed.
    waiting = parameters.weights.keys() - results
    assert not waiting, f"{sorted(waiting)[:3]} do not enter the loss"
    return results
