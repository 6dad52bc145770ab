"""Parts of the noise of a Hutchinson trace: the text's, the probes' and that of both
together.

Shapes: I sequences, J probes.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Variances(NamedTuple):
    """Variances of v'Hv, relative to the squared trace: between sequences, between probes, and of both
    together.
    """

    sequence: float
    probe: float
    both: float

    def error_of_fixed(self, sequences: int, probes: int) -> float:
        """Relative standard error of probes that all meet the same sequences, as in the
        libraries.
        """
        return math.sqrt(
            self.sequence / sequences + self.probe / probes + self.both / (sequences * probes)
        )

    def error_of_fresh(self, pairs: int, size: int) -> float:
        """Relative standard error of pairs of a fresh probe and `size` fresh sequences."""
        return math.sqrt((self.sequence / size + self.probe + self.both / size) / pairs)


def variances_of(table_IJ: Tensor) -> Variances:
    """Unbiased estimates from a two-way table without replication."""
    (rows, columns), mean = table_IJ.shape, table_IJ.mean()
    of_rows_I, of_columns_J = table_IJ.mean(1), table_IJ.mean(0)
    rest_IJ = table_IJ - of_rows_I[:, None] - of_columns_J + mean
    both = rest_IJ.square().sum() / ((rows - 1) * (columns - 1))
    parts = (of_rows_I.var() - both / columns, of_columns_J.var() - both / rows, both)
    return Variances(*(float(variance / mean**2) for variance in parts))


def jackknife(table_IJ: Tensor, statistic: Callable[[Tensor], float]) -> float:
    """Standard error of a statistic of the table, leaving out each row and each column."""
    total = 0.0
    for table in (table_IJ, table_IJ.T):
        kept = [torch.cat((table[:index], table[index + 1 :])) for index in range(len(table))]
        values = [statistic(rest if table is table_IJ else rest.T) for rest in kept]
        total += (len(values) - 1) * statistics.pvariance(values)
    return math.sqrt(total)
