"""Exact Hessian-vector products by dual layers: L and g.v in one pass, Hv as the gradient of g.v.

The backward pass hands over every (Hv)_t when it is complete, so that v'Hv of billions of
parameters needs no vector in memory beside the weights and their tangents.

Shapes: B sequences of a batch, S positions of a sequence, p parameters of this rank.
"""

from collections.abc import Callable

from torch import Tensor

from curvature.products.interface import HessianProduct, Quadratic, SketchedProduct
from curvature.products.model import CurvedModel
from curvature.products.parameters import Parameters, Probe, dot, local
from curvature.products.sketch import CountSketch


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
        self._model.set_tangents(self.parameters.split(v_p).__getitem__)
        loss, slope = self._model.dual_loss(tokens_BS1)
        hv_p = self.parameters.zeros()
        parts = self.parameters.split(hv_p)
        _backward(self.parameters, slope.share, lambda name, hv: parts[name].copy_(hv))
        return HessianProduct(loss, slope.value, hv_p)

    def quadratic(self, tokens_BS1: Tensor, v_p: Tensor) -> Quadratic:
        """Return v_t'(Hv)_t of every tensor t; in bf16 v is the rounded one on both sides."""
        return self._quadratic(tokens_BS1, self.parameters.split(v_p).__getitem__)

    def probed(self, tokens_BS1: Tensor, probe: Probe) -> Quadratic:
        """Return the same for a probe, which is drawn tensor by tensor where they are."""
        return self._quadratic(tokens_BS1, lambda name: self.parameters.signs(name, probe))

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Return the picture of Hv for the sketch's probe."""
        self._model.set_tangents(lambda name: self.parameters.signs(name, sketch.along))
        loss, slope = self._model.dual_loss(tokens_BS1)
        picture_s = sketched_gradient(self.parameters, slope.share, sketch)
        return SketchedProduct(loss, slope.value, picture_s)

    def _quadratic(self, tokens_BS1: Tensor, direction: Callable[[str], Tensor]) -> Quadratic:
        self._model.set_tangents(direction)
        loss, slope = self._model.dual_loss(tokens_BS1)
        dots = streamed(
            self.parameters, slope.share, lambda name, hv: dot(self._model.tangent(name), hv)
        )
        return Quadratic(loss, slope.value, dots)


def sketched_gradient(parameters: Parameters, objective: Tensor, sketch: CountSketch) -> Tensor:
    """Return the picture of an objective's gradient by all parameters, this rank's part."""
    parts: dict[str, Tensor] = {}

    def take(name: str, gradient: Tensor) -> None:
        parts[name] = sketch.part(name, gradient)

    _backward(parameters, objective, take)
    return sketch.whole(parts.__getitem__)


def streamed(
    parameters: Parameters, objective: Tensor, measure: Callable[[str, Tensor], Tensor]
) -> dict[str, float]:
    """Return a number of every tensor's gradient, without two gradients in memory at once.

    `measure` makes of a name and this rank's part of the gradient a float64 scalar; they are summed
    over the ranks.
    """
    sums: dict[str, Tensor] = {}

    def take(name: str, gradient: Tensor) -> None:
        sums[name] = measure(name, gradient)

    _backward(parameters, objective, take)
    return parameters.total([sums[name] for name in parameters.weights])


def _backward(
    parameters: Parameters, objective: Tensor, take: Callable[[str, Tensor], object]
) -> None:
    """Run the backward pass of an objective; hand every complete gradient to `take` and drop it."""
    waiting = set(parameters.weights)

    def hook_of(name: str) -> Callable[[Tensor], None]:
        def hook(weight: Tensor) -> None:
            assert weight.grad is not None
            take(name, local(weight.grad))
            weight.grad = None
            waiting.remove(name)

        return hook

    # Autograd calls them after the last contribution to a weight, FSDP2 after the reduction.
    hooks = [
        weight.register_post_accumulate_grad_hook(hook_of(name))
        for name, weight in parameters.weights.items()
    ]
    try:
        objective.backward()
    finally:
        for hook in hooks:
            hook.remove()
    assert not waiting, f"{sorted(waiting)[:3]} do not enter the loss"
