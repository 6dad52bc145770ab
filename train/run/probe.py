"""Settings of the probe of quantization while training; a part of `train.run.config`."""

import math
from typing import Annotated

from pydantic import Field

from base.frozen import Frozen
from train.data.config import DataConfig
from train.model.config import ModelConfig, hidden_matrices, parameter_shapes, residual_linears
from train.model.precision import FP8_RECIPES
from train.run.parallel import ParallelConfig


def short_name(weight: str) -> str:
    """Return the name of a linear in metrics, by the HF name of its weight.

    >>> short_name("model.layers.2.mlp.down_proj.weight")
    'layers.2.mlp.down_proj'
    """
    return weight[weight.index("layers.") :].removesuffix(".weight")


class ProbeConfig(Frozen):
    """The loss with rounded weights, and the output errors of a few linears, while training.

    Weights are those of all linears of the decoder blocks, rounded to nearest as `python -m
    quant_eval run --spec rtn-b3-g128` rounds an export. The linears whose output errors are
    measured are the two of a layer that write to the residual stream, by RTN and by GPTQ.
    """

    every_steps: int = Field(
        gt=0,
        description=(
            "at its multiples; a probe of 2 widths and 8 sequences takes the FLOPs of training on"
            " 10.7: below 0.1% of a run from every_steps x batch_size = 10,700 on, such as 42 steps"
            " of 256 sequences"
        ),
    )
    sequences: int = Field(
        default=8, gt=0, description="of the held-out text, the first of data.held_out_sequences"
    )
    bits: tuple[Annotated[int, Field(ge=2, le=8)], ...] = Field(default=(3, 4), min_length=1)
    group_size: int = Field(default=128, gt=1, description="inputs that share a scale")
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        description="decoder layers whose output errors are measured, from 0; None: the middle one",
    )

    def specs(self, bits: int) -> tuple[str, str]:
        """Return RTN and GPTQ to so many bits, by the names that `quant_eval run --spec` takes.

        >>> ProbeConfig(every_steps=1).specs(3)
        ('rtn-b3-g128', 'gptq-b3-g128')
        """
        return f"rtn-b{bits}-g{self.group_size}", f"gptq-b{bits}-g{self.group_size}"

    def linears(self, model: ModelConfig) -> list[str]:
        """Return HF names of the weights whose output errors are measured."""
        layers = (model.num_hidden_layers // 2,) if self.layers is None else self.layers
        return [name for layer in layers for name in residual_linears(model, layer)]

    def cost(self, batch_size: int, replicas: int = 1) -> float:
        """Return the time of probes over that of training, from counted FLOPs.

        A forward pass is a third of training on the same tokens. The losses share sequences out
        over the replicas; the inputs of linears are recorded on one replica, while the others
        wait. Rounding itself is not counted: on a CPU it took 5% of a probe of 160M parameters, and
        half of one of a million.
        """
        # With exact weights, with each width, and for inputs on one replica while the others wait.
        passes = 1 + len(self.bits) + (replicas if self.layers != () else 0)
        return passes * self.sequences / (3 * self.every_steps * batch_size)

    def check(
        self, model: ModelConfig, data: DataConfig, parallel: ParallelConfig, precision: str
    ) -> None:
        """Raise ValueError where the settings do not fit those of a run."""
        # The settings by themselves, and within the run's.
        if precision in FP8_RECIPES:
            raise ValueError(
                f"probe rounds weights that {precision} would round again; set precision to 'bf16'"
                " or remove probe"
            )
        if len(set(self.bits)) != len(self.bits):
            raise ValueError(f"probe.bits {list(self.bits)} has a width twice; remove one")
        if self.sequences > data.held_out_sequences:
            raise ValueError(
                f"probe.sequences {self.sequences} is above data.held_out_sequences"
                f" {data.held_out_sequences}; lower it"
            )
        if max(self.layers or (0,)) >= model.num_hidden_layers:
            raise ValueError(
                f"probe.layers {list(self.layers or ())} has one that the model lacks; its last is"
                f" {model.num_hidden_layers - 1}"
            )

        # The shapes of the linears.
        self._check_groups(model, parallel.tensor)
        shapes = parameter_shapes(model)
        widest = max((shapes[name][1] for name in self.linears(model)), default=0)
        if self.sequences * data.sequence_length < widest:
            raise ValueError(
                f"probe.sequences {self.sequences} of {data.sequence_length} tokens are fewer than"
                f" the {widest} inputs of a linear: the damping would decide its Hessian; raise it,"
                " or set probe.layers to []"
            )

    def _check_groups(self, model: ModelConfig, tensor: int) -> None:
        """Raise ValueError unless every rank's inputs of every linear are whole groups."""
        shapes, layers = parameter_shapes(model), range(model.num_hidden_layers)
        # Tensor parallelism cuts the inputs of these alone.
        cut = {name for layer in layers for name in residual_linears(model, layer)}
        inputs = {
            name: shapes[name][1] // (tensor if name in cut else 1)
            for name in sorted(hidden_matrices(model))
        }
        fitting = math.gcd(self.group_size, *inputs.values())
        for name, count in inputs.items():
            if count % self.group_size:
                raise ValueError(
                    f"probe.group_size {self.group_size} does not divide the {count} inputs of"
                    f" {name} on a rank; set {fitting}"
                )
