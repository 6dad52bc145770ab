"""The second moment of a linear's inputs, the Hessian of GPTQ's objective, summed in float64.

`quant_eval.measuring` and the probe of a training run add inputs; GPTQ factors the mean.

Shapes: N tokens, O output features (rows), I input features, C rows at a time.
"""

import torch
from torch import Tensor

from base.errors import UserError

# Multiplied at a time: enough for full speed, a small buffer, and few enough for sums in fp32.
CHUNK_TOKENS = 1024
MIN_BLOCK_COLUMNS = 64
MIRRORED_COLUMNS = 256
CHUNK_ROWS = 1024  # in float64 at a time


def product_dtype(inputs: torch.dtype) -> torch.dtype:
    """Return the dtype in which the products of a chunk of inputs are summed.

    Products of two bf16 numbers are exact in fp32. Sums of 1,024 of them are wrong by 4e-8 to
    1.3e-7, far below what rounding the inputs to bf16 did; 99.99% of the codes and more stay. fp32
    inputs stay in float64: fp32 sums are wrong by as much as these inputs are, which hides whether
    a Hessian is singular and moves the pivots of one with condition 1e9 by 0.4%.

    Example:
        >>> product_dtype(torch.bfloat16), product_dtype(torch.float32)
        (torch.float32, torch.float64)
    """
    return torch.float32 if inputs == torch.bfloat16 else torch.float64


class InputHessian:
    """X X^T = sum over tokens of x x^T, of the inputs x of one linear.

    Only blocks of columns from the diagonal to the right are computed, which saves 7/16 of the
    products. A chunk of 1,024 tokens is multiplied in `product_dtype` and added in float64.

    Attributes:
        tokens: how many were added.
        sum_II: float64; over ranks, summed element by element, as `tokens` is.

    Example: the tokens (1, 2) and (3, 0).
        >>> hessian = InputHessian(2, torch.device("cpu"), torch.float32)
        >>> hessian.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
        >>> hessian.mean("a linear").tolist()
        [[5.0, 1.0], [1.0, 2.0]]
    """

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the inputs, by which all ranks agree on the precision."""
        self.tokens = 0
        self.sum_II = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._in_float64 = product_dtype(dtype) == torch.float64
        # Tensor cores multiply bf16 and sum in fp32; a CPU multiplies in the dtype it sums in.
        self._on_tensor_cores = device.type != "cpu" and not self._in_float64
        factors = dtype if self._on_tensor_cores else product_dtype(dtype)
        self._chunk_NI = torch.empty(CHUNK_TOKENS, width, dtype=factors, device=device)
        # Of 8 x 8 blocks 36 lie on the diagonal or right of it: 9/16 of the products.
        size = max(MIN_BLOCK_COLUMNS, -(-width // 8))
        self._blocks = [slice(start, min(start + size, width)) for start in range(0, width, size)]

    @torch.no_grad()
    def add(self, inputs: Tensor) -> None:
        """Add the tokens of a batch [..., I] of any float dtype."""
        inputs_NI = inputs.reshape(-1, inputs.shape[-1])
        self.tokens += len(inputs_NI)
        for part_NI in inputs_NI.split(CHUNK_TOKENS):
            chunk_NI = self._chunk_NI[: len(part_NI)].copy_(part_NI)
            for block in self._blocks:
                sum_CI = self.sum_II[block, block.start :]
                left_CN, right_NI = chunk_NI[:, block].T, chunk_NI[:, block.start :]
                if self._in_float64:
                    sum_CI.addmm_(left_CN, right_NI)
                elif self._on_tensor_cores:
                    sum_CI.add_(torch.mm(left_CN, right_NI, out_dtype=torch.float32))
                else:
                    sum_CI.add_(left_CN @ right_NI)

    def mean(self, name: str) -> Tensor:
        """Return X X^T / tokens, symmetric float64 [I, I].

        Raises:
            UserError: an input of the linear `name` was not finite.
        """
        assert self.tokens
        mean_II = self.sum_II / self.tokens
        mirror(mean_II)
        check_finite(mean_II, name)
        return mean_II


def check_finite(statistics: Tensor, name: str) -> None:
    """Raise UserError with a linear's or site's `name` unless its inputs' statistics are finite."""
    if not bool(statistics.isfinite().all()):
        raise UserError(
            f"{name}: its calibration inputs hold NaN or infinity; "
            "check the checkpoint with 'python -m ckpt_tools inspect --verify'"
        )


def row_output_errors(
    weight_OI: Tensor, quantized_OI: Tensor, hessian_II: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (w - wq) H (w - wq)^T, GPTQ's objective (eq. 1), and w H w^T of each row, [O].

    With H the mean of x x^T both are mean squares of outputs; their ratio is the relative error.

    Example: errors of the same sign add up under correlated inputs, of opposite signs they cancel.
        >>> weight_OI = torch.tensor([[1.5, 1.5], [1.5, 0.5]])
        >>> hessian_II = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
        >>> row_output_errors(weight_OI, torch.ones(2, 2), hessian_II)[0].tolist()
        [0.75, 0.25]
    """
    none_O = weight_OI.new_empty(0, dtype=torch.float64)
    errors, norms = [none_O], [none_O]
    for weight_CI, quantized_CI in zip(
        weight_OI.split(CHUNK_ROWS), quantized_OI.split(CHUNK_ROWS), strict=True
    ):
        exact_CI = weight_CI.double()
        errors.append(_quadratic_forms(exact_CI - quantized_CI.double(), hessian_II))
        norms.append(_quadratic_forms(exact_CI, hessian_II))
    return torch.cat(errors), torch.cat(norms)


def _quadratic_forms(rows_CI: Tensor, hessian_II: Tensor) -> Tensor:
    """Return x H x^T of each row x in float64.

    H is symmetric, so blocks of columns left of the diagonal are not read, and those right of it
    count twice: 9/16 of the products.
    """
    forms_C = rows_CI.new_zeros(len(rows_CI))
    size = -(-len(hessian_II) // 8)
    # The sum over blocks b of x_b H_bb x_b^T, and twice x_a H_ab x_b^T for every a before b.
    for start in range(0, len(hessian_II), size):
        block = slice(start, start + size)
        block_CK = rows_CI[:, block]
        product_CK = block_CK @ hessian_II[block, block]
        product_CK.addmm_(rows_CI[:, :start], hessian_II[:start, block], alpha=2)
        forms_C += product_CK.mul_(block_CK).sum(1)
    return forms_C


def mirror(matrix_II: Tensor) -> None:
    """Copy what is right of the diagonal of a square matrix to the left of it, in place.

    By blocks of columns: a whole transpose beside the matrix would take as much memory again.

    Example:
        >>> matrix_II = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
        >>> mirror(matrix_II)
        >>> matrix_II.tolist()
        [[1.0, 2.0], [2.0, 3.0]]
    """
    for start in range(0, len(matrix_II), MIRRORED_COLUMNS):
        end = start + MIRRORED_COLUMNS
        # The square on the diagonal is mirrored in itself, what is right of it to the rows below.
        square = matrix_II[start:end, start:end]
        square.copy_(square.triu() + square.triu(1).T)
        matrix_II[end:, start:end] = matrix_II[start:end, end:].T
