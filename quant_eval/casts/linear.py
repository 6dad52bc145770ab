"""Linears whose inputs are transformed and cast, in place of those of a decoder block.

The formula y = L (Q_w(L^T W T) Q_a(T^-1 (x - b))) + W b + bias: `transforms` has T, b and L,
`rounding` Q_w and `activations` Q_a.

Shapes: O output features, I input features; tokens are rows [..., I].
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear as multiply

from quant_eval.transforms.steps import Transform


class _Remembered(NamedTuple):
    """A tensor that was cast: `version` counts how often it was written in place before."""

    x: Tensor
    version: int
    cast: Tensor
    readers_left: int


class CastInput(nn.Module):
    """The transformed and cast input of one linear, or of several that read the same tensor.

    The first of them computes it, and it is remembered until the last has read it.

    Attributes:
        readers: how many linears share it; see `share_inputs`.
    """

    def __init__(self, transform: Transform, cast: nn.Module) -> None:
        super().__init__()
        self.transform, self.cast, self.readers = transform, cast, 1
        self._last: _Remembered | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return Q_a of inputs [..., I] in the basis of the weights, in the dtype of the inputs."""
        if self.readers == 1:
            return self._compute(x)
        last = self._last
        # The same tensor may have been written in place since, which its version counter shows.
        if last is None or last.x is not x or last.version != x._version:
            last = _Remembered(x, x._version, self._compute(x), self.readers)
        last = last._replace(readers_left=last.readers_left - 1)
        # Dropped after its last reader, so that no activation is kept from one forward to the next.
        self._last = last if last.readers_left else None
        return last.cast

    def _compute(self, x: Tensor) -> Tensor:
        cast: Tensor = self.cast(self.transform.inputs(x))
        return cast


class CastLinear(nn.Module):
    """A linear that multiplies cast inputs by rounded weights.

    Args of the constructor:
        weight_OI: what L^T W T was rounded to, in the dtype to compute in.
        bias: of the outputs, from `shifted_bias`.
        transform: T, and the shift b.
        cast: `ActivationCast`; `nn.Identity()` casts nothing.
        output: L, orthogonal, if outputs are rotated back: W' = `output.weight`(W^T)^T was rounded.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias: Tensor | None,
        transform: Transform,
        cast: nn.Module,
        output: Transform | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.inputs, self.output = CastInput(transform, cast), output

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [..., O] of inputs [..., I], in their dtype."""
        inputs = self.inputs(x)
        if self.output is None:
            return multiply(inputs, self.weight, self.bias)
        outputs = self.output.restored(multiply(inputs, self.weight))  # rows times L^-1 = L^T
        return outputs if self.bias is None else outputs + self.bias


def shifted_bias(weight_OI: Tensor, bias: Tensor | None, transform: Transform) -> Tensor | None:
    """Return W b + bias of a linear's own weight, as in BASE-Q (arXiv:2506.15689), summed in fp64.

    So what the shift takes off the inputs reaches the outputs by the weight that is not rounded.
    """
    if transform.shift_I is None:
        return bias
    shifted_O = weight_OI.double() @ transform.shift_I.double()
    if bias is not None:
        shifted_O += bias.double()
    return shifted_O.to(weight_OI.dtype)


def share_inputs(linears: Sequence[CastLinear]) -> None:
    """Let linears that read one tensor, and have one transform and cast, compute its cast once.

    All of them have to read it in every forward.
    """
    shared = linears[0].inputs
    for linear in linears:
        assert linear.inputs.transform is shared.transform
        assert linear.inputs.cast is shared.cast
        linear.inputs = shared
    shared.readers = len(linears)
