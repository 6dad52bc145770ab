"""Outlier statistics of what linears read and of their weights, by sums that add up.

`quant_eval.measuring.outliers` measures checkpoints with them, `train.observing` runs in training.

The text of arXiv:2509.23500 was not at hand, only its abstract and what others write of it. There
MMR is the ratio of the largest |x| to the mean of |x|, elsewhere to the median, so both are here.
By row, as the scales of its quantization are (absolute maxima of rows). arXiv:2602.02047 has the
kurtosis of a tensor, less 3, and channels with persistently large magnitudes. The share of the
squared norm in 1% of channels is ours.

Shapes: N rows (tokens of inputs, output features of a weight), I input features (channels), K sums
    of a row.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from base.outlier_names import STATISTICS

TOP_SHARE = 0.01  # of the channels
POWERS = 5  # x^0 to x^4


def power_sums(x_NI: Tensor) -> Tensor:
    """Return the sums of x^0 to x^4 over each row, float64 [N, 5]."""
    x_NI = x_NI.float()
    square_NI = x_NI * x_NI
    powers = torch.ones_like(x_NI), x_NI, square_NI, square_NI * x_NI, square_NI * square_NI
    return torch.stack([power_NI.sum(-1, dtype=torch.float64) for power_NI in powers], -1)


def kurtosis(powers: Tensor) -> Tensor:
    """Return E[(x - m)^4] / E[(x - m)^2]^2 with m = E[x], over all entries: 3 of a Gaussian.

    Args:
        powers: sums of x^0 to x^4 over the entries, float64 [..., 5]; see `power_sums`.

    Example: the fourth moment of -1, 0, 0 and 1 is 1 / 2, and so is their variance.
        >>> kurtosis(power_sums(torch.tensor([[-1.0, 0.0, 0.0, 1.0]]))).tolist()
        [2.0]
    """
    first, second, third, fourth = (powers[..., 1:] / powers[..., :1]).unbind(-1)
    variance = second - first**2
    return (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4) / variance**2


def max_to_mean(x_NI: Tensor) -> Tensor:
    """Return max |x| / mean |x| of each row, [N]; the MMR of the abstract of arXiv:2509.23500.

    Example:
        >>> max_to_mean(torch.tensor([[1.0, -2.0, 2.0, 7.0]])).tolist()
        [2.3333332538604736]
    """
    sizes_NI = x_NI.float().abs()
    return sizes_NI.amax(-1) / sizes_NI.mean(-1)


def max_to_median(x_NI: Tensor) -> Tensor:
    """Return max |x| / median |x| of each row, [N]; of an even number the lower median.

    Infinite where half of a row and more is 0.

    Example:
        >>> max_to_median(torch.tensor([[1.0, -2.0, 3.0, 7.0]])).tolist()
        [3.5]
    """
    sizes_NI = x_NI.float().abs()
    if sizes_NI.is_cuda:  # selecting is refused there if algorithms have to be deterministic
        median_N = sizes_NI.sort(-1).values[..., (sizes_NI.shape[-1] - 1) // 2]
    else:
        median_N = sizes_NI.median(-1).values
    return sizes_NI.amax(-1) / median_N


def top_channels(squares: Tensor) -> Tensor:
    """Return the share of the squared norm in the 1% of channels that have most of it, [...].

    It is at least ceil(I / 100) / I, which equal channels have.

    Args:
        squares: sums of x^2 over the rows, [..., I].

    Example: the first of four channels.
        >>> top_channels(torch.tensor([6.0, 1.0, 2.0, 1.0]))
        tensor(0.6000)
    """
    count = -(-squares.shape[-1] // round(1 / TOP_SHARE))
    return squares.topk(count, sorted=False).values.sum(-1) / squares.sum(-1)


def row_sums(x_NI: Tensor) -> Tensor:
    """Return what statistics add up over rows, float64 [N, K]: powers, then both ratios."""
    ratios = max_to_mean(x_NI)[:, None], max_to_median(x_NI)[:, None]
    return torch.cat([power_sums(x_NI), *(ratio_N1.double() for ratio_N1 in ratios)], -1)


def statistics(sums: Tensor, squares: Tensor) -> dict[str, Tensor]:
    """Return every statistic by its name, [...]: ratios are means over rows.

    Whatever is counted equally often throughout, as on ranks with the same rows, changes none.

    Args:
        sums: of `row_sums` over rows, [..., K].
        squares: sums of x^2 by channel, [..., I].
    """
    rows = sums[..., 0] / squares.shape[-1]
    ratios = (sums[..., POWERS:] / rows[..., None]).unbind(-1)
    values = kurtosis(sums[..., :POWERS]), *ratios, top_channels(squares)
    return dict(zip(STATISTICS, values, strict=True))


class OutlierSums:
    """Sums over rows that are added batch by batch, and may be added over ranks.

    Attributes:
        sums_K: of `row_sums`.
        squares_I: of x^2 by channel.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.sums_K = torch.zeros(POWERS + 2, dtype=torch.float64, device=device)
        self.squares_I = torch.zeros(width, dtype=torch.float64, device=device)

    @staticmethod
    def over(pieces: Iterable[Tensor]) -> "OutlierSums":
        """Return the sums over the rows of all pieces [N, I]."""
        first, *others = pieces
        sums = OutlierSums(first.shape[-1], first.device)
        for piece_NI in (first, *others):
            sums.add(piece_NI)
        return sums

    def add(self, x: Tensor) -> None:
        """Add the rows of a batch [..., I] of any float dtype."""
        x_NI = x.reshape(-1, x.shape[-1])
        self.sums_K += row_sums(x_NI).sum(0)
        self.squares_I += x_NI.float().square().sum(0, dtype=torch.float64)

    def statistics(self) -> dict[str, float]:
        """Return every statistic by its name; one that is not defined is infinite or NaN."""
        values = statistics(self.sums_K, self.squares_I)
        return {name: value.item() for name, value in values.items()}
