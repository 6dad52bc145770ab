"""Exact Hessian-vector products by dual layers: L and g.v in one pass, Hv as the gradient of g.v.

Shapes: B sequences of a batch, S positions of a sequence, p parameters of this rank, s entries of a picture.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from curvature.model import CurvedModel
from curvature.parameters import Parameters, Probe, dot, local
from curvature.sketch import CountSketch
from curvature.trace.hutchinson import Quadratic


class HessianProduct(NamedTuple):
    """Of the mean cross-entropy over one batch.

    Attributes:
        loss: nats per token.
        slope: g.v.
        hv_p: this rank's part of Hv.
    """

    loss: float
    slope: float
    hv_p: Tensor


class SketchedProduct(NamedTuple):
    """A product with a probe, of which only a picture is kept.

    Attributes:
        loss: nats per token.
        slope: g.v.
        picture_s: of Hv.
    """

    loss: float
    slope: float
    picture_s: Tensor


class Hessian(Protocol):
    """A way to Hessian-vector products of the mean loss over sequences of S inputs and labels, int64 [B, S + 1]."""

    @property
    def parameters(self) -> Parameters:
        """The parameters that vectors run over."""
        ...

    def product(self, tokens_BS1: Tensor, v_p: Tensor) -> HessianProduct:
        """Hv."""
        ...

    def quadratic(self, tokens_BS1: Tensor, v_p: Tensor) -> Quadratic:
        """v'Hv, part by part."""
        ...

    def probed(self, tokens_BS1: Tensor, probe: Probe) -> Quadratic:
        """The same for a probe, which need not lie in memory as a vector."""
        ...

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Hv for the sketch's probe, in its picture."""
        ...


class DualHessian:
    """Products by dual layers, exact up to rounding."""

    def __init__(self, model: CurvedModel) -> None:
        self.parameters = model.parameters
        self._model = model

    def product(self, tokens_BS1: Tensor, v_p: Tensor) -> HessianProduct:
        """Hv, kept whole."""
        self._model.set_tangents(self.parameters.split(v_p).__getitem__)
        loss, slope = self._model.dual_loss(tokens_BS1)
        return HessianProduct(loss, slope.value, whole_gradient(self.parameters, slope.share))

    def quadratic(self, tokens_BS1: Tensor, v_p: Tensor) -> Quadratic:
        """v_t'(Hv)_t of every tensor t as soon as the backward pass has its (Hv)_t, which is then dropped.

        In bf16 v is the rounded one on both sides.
        """
        return self._quadratic(tokens_BS1, self.parameters.split(v_p).__getitem__)

    def probed(self, tokens_BS1: Tensor, probe: Probe) -> Quadratic:
        """The same for a probe, which is drawn where its tensors lie."""
        return self._quadratic(tokens_BS1, lambda name: self.parameters.signs(name, probe))

    def sketched(self, tokens_BS1: Tensor, sketch: CountSketch) -> SketchedProduct:
        """Hv for the sketch's probe, in its picture."""
        self._model.set_tangents(lambda name: self.parameters.signs(name, sketch.along))
        loss, slope = self._model.dual_loss(tokens_BS1)
        return SketchedProduct(loss, slope.value, sketched_gradient(self.parameters, slope.share, sketch))

    def _quadratic(self, tokens_BS1: Tensor, direction: Callable[[str], Tensor]) -> Quadratic:
        self._model.set_tangents(direction)
        loss, slope = self._model.dual_loss(tokens_BS1)
        dots = streamed(self.parameters, slope.share, lambda name, hv: dot(self._model.tangent(name), hv))
        return Quadratic(loss, slope.value, dots)


def whole_gradient(parameters: Parameters, objective: Tensor) -> Tensor:
    """The gradient of an objective by all parameters, this rank's part, as a vector."""
    gradient_p = parameters.zeros()
    parts = parameters.split(gradient_p)
    _backward(parameters, objective, lambda name, gradient: parts[name].copy_(gradient))
    return gradient_p


def sketched_gradient(parameters: Parameters, objective: Tensor, sketch: CountSketch) -> Tensor:
    """The picture of the gradient of an objective by all parameters, this rank's part."""
    parts: dict[str, Tensor] = {}

    def take(name: str, gradient: Tensor) -> None:
        parts[name] = sketch.part(name, gradient)

    _backward(parameters, objective, take)
    return sketch.whole(parts.__getitem__)


def streamed(parameters: Parameters, objective: Tensor, measure: Callable[[str, Tensor], Tensor]) -> dict[str, float]:
    """A number of every tensor's gradient, taken when the backward pass has it; no two gradients need lie in memory.

    `measure` makes of a name and this rank's part of the gradient a float64 scalar; they are summed over the ranks.
    """
    sums: dict[str, Tensor] = {}

    def take(name: str, gradient: Tensor) -> None:
        sums[name] = measure(name, gradient)

    _backward(parameters, objective, take)
    return parameters.total([sums[name] for name in parameters.weights])


def _backward(parameters: Parameters, objective: Tensor, take: Callable[[str, Tensor], object]) -> None:
    """The backward pass of an objective; every gradient is handed to `take` when it is complete, and dropped."""
    waiting = set(parameters.weights)

    def hook_of(name: str) -> Callable[[Tensor], None]:
        def hook(weight: Tensor) -> None:
            assert weight.grad is not None
            take(name, local(weight.grad))
            weight.grad = None
            waiting.remove(name)

        return hook

    hooks = [w.register_post_accumulate_grad_hook(hook_of(name)) for name, w in parameters.weights.items()]
    try:
        objective.backward()
    finally:
        for hook in hooks:
            hook.remove()
    assert not waiting, f"{sorted(waiting)[:3]} do not enter the loss"
