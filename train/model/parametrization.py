"""CompleteP: settings that were found at one width and depth, for a model of another.

(Dey et al. 2025, arXiv 2505.01618, table 1 with alpha = 1; at one depth it is muP, Yang et al.
2022, arXiv 2203.03466.) With the ratios N of widths and L of depths to those of the base:

| parameters                | initial std | rate of Adam | epsilon   | multiplier of their output |
|---------------------------|-------------|--------------|-----------|----------------------------|
| token embedding           | 1           | 1            | 1 / N     |                            |
| matrices of blocks        | 1 / sqrt N  | 1 / N        | 1 / (N L) | 1 / L after the last one   |
| norms, biases of blocks   | 1           | 1            | 1 / (N L) | 1 / L after the last one   |
| final norm                | 1           | 1            | 1 / N     | 1 / N                      |
| head                      | 1           | 1            | 1 / N     |                            |

Decay is divided by the factor of the rate: a step shrinks all weights by the same share. Epsilon
follows the size of gradients; of the paper's table its part outside the blocks is an extension.

A stock model has no multipliers, so the weights before them absorb them: `Scaling.absorbing`. After
a final norm without weights the head does.
"""

from typing import NamedTuple, Self

from train.model.config import ModelConfig
from train.model.families import LAYERS


class Scaling(NamedTuple):
    """The factors of a parameter: of its initial value, its learning rate and AdamW's epsilon."""

    initial: float = 1.0
    rate: float = 1.0
    epsilon: float = 1.0

    def absorbing(self, multiplier: float) -> Self:
        """Return the factors of v = m w, in a model that has v where another has m times w.

        The gradient by v is 1 / m times that by w, so AdamW sees what it saw with an epsilon 1 / m
        times as large; it then moves v by m times as much as w. So v stays m w at every step.
        """
        return self._replace(
            initial=self.initial * multiplier,
            rate=self.rate * multiplier,
            epsilon=self.epsilon / multiplier,
        )


def completep(
    name: str, model: ModelConfig, *, base_width: int, base_depth: int, rate_by_width: float
) -> Scaling:
    """Return the factors of a parameter.

    Args:
        name: of the parameter in HF's checkpoint.
        model: that has it.
        base_width: hidden size at which the settings were found.
        base_depth: layers at which they were found.
        rate_by_width: the power of the width that the rate of hidden matrices has: -1 where an
            update has entries of a fixed size, -1/2 where it has singular values that grow with
            the square root of the width (Yang et al. 2023, arXiv 2310.17813).

    Example: a model of four times the width and twice the depth.
        >>> from train.model.presets import OLMO2_30M
        >>> sizes = {"base_width": 64, "base_depth": 2, "rate_by_width": -1.0}
        >>> completep("model.layers.0.mlp.down_proj.weight", OLMO2_30M, **sizes)
        Scaling(initial=0.5, rate=0.25, epsilon=0.125)
        >>> completep("model.layers.0.post_feedforward_layernorm.weight", OLMO2_30M, **sizes)
        Scaling(initial=0.5, rate=0.5, epsilon=0.25)
    """
    width, depth = model.hidden_size / base_width, model.num_hidden_layers / base_depth
    row, (*_, module, part) = model.row, name.split(".")
    if f".{LAYERS}." not in name:
        scaling = Scaling(epsilon=1 / width)
        # The norm before the head, so that a head that is the embedding as well stays that.
        absorbs = row.head_in_files if row.norm == "bare" else row.final_norm
        return scaling.absorbing(1 / width) if module == absorbs else scaling

    linears = {*row.reading, row.writing, *row.mlp_reading, row.mlp_writing}
    scaling = Scaling(epsilon=1 / (width * depth))
    if module in linears and part == "weight":
        scaling = scaling._replace(initial=width**-0.5, rate=width**rate_by_width)
    last = {
        "before": (row.writing, row.mlp_writing),
        "after": (row.attention_norm, row.mlp_norm),
    }
    return scaling.absorbing(1 / depth) if module in last[row.norms] else scaling
