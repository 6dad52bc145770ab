"""Settings of what changes the weights that forward and backward see; a part of run.json.

The update is that of the exact weights: `train.perturbing` restores them before it, bit for bit.

Names of grids are those of `quant_eval`, whose function reads them. As `quant_eval` imports
`train`, it is looked up by its name.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Annotated, ClassVar, Literal, Protocol, Self, cast, override

from pydantic import Field, field_validator, model_validator

from base.frozen import Frozen
from base.names import take_one_of
from train.model.config import ModelConfig, hidden_matrices, parameter_shapes

SPECS = "quant_eval.specs"


class WeightGrid(Protocol):
    """The part of a spec of `quant_eval` that training reads."""

    @property
    def format(self) -> str:
        """Return the format of its numbers: "int" of integers."""
        ...

    @property
    def group_size(self) -> int | None:
        """Return the inputs that share a scale; None: a whole row does."""
        ...

    @property
    def scales_tensors(self) -> bool:
        """Return whether one scale is of all linears that read the same input."""
        ...

    def check_sizes(self, name: str, shape: tuple[int, int]) -> None:
        """Raise ValueError where groups do not divide the inputs of a linear."""
        ...


def module_name(weight: str) -> str:
    """Return the name of a linear within its part of a block, by the HF name of its weight.

    >>> module_name("model.layers.2.mlp.down_proj.weight")
    'down_proj'
    """
    return weight.removesuffix(".weight").rpartition(".")[2]


class _Perturbation(Frozen, ABC):
    """A change of the weights from a step on, or in the anneal alone.

    Attributes:
        PASSES: forward and backward passes of each sequence in an active update.
    """

    PASSES: ClassVar[int] = 1

    from_step: int | None = Field(
        default=None, gt=0, description="the first update with it; None: the anneal's first"
    )

    def active_steps(self, after: int, until: int, anneal_start: int | None) -> int:
        """Return how many of the updates after `after`, up to `until`, have changed weights.

        Args:
            after: 0, or the last update that does not count.
            until: the last update that counts.
            anneal_start: `Anneal.start_step` of the run, if it has an anneal.

        Example: the anneal from step 80 on, and every third step of it.
            >>> Sam(rho=0.1).active_steps(0, 100, anneal_start=80)
            20
            >>> Sam(rho=0.1, every_steps=3).active_steps(0, 100, anneal_start=80)
            7
        """
        first = self.first_step(anneal_start)
        if first is None:
            return 0
        return max(0, self._eligible(until) - self._eligible(max(after, first - 1)))

    def first_step(self, anneal_start: int | None) -> int | None:
        """Return the update that it begins with; None: with an anneal, and there is none."""
        if self.from_step is not None:
            return self.from_step
        return None if anneal_start is None else anneal_start + 1

    def _eligible(self, step: int) -> int:
        """Return how many of the updates up to `step` may be active."""
        return step

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError where the settings do not fit a model."""

    @abstractmethod
    def describe(self) -> str:
        """Return the perturbation in words."""


class _OfLinears(_Perturbation):
    """A change of the weights of the blocks' linears by the grid of a spec."""

    spec: str = Field(
        description="rounding to nearest as `python -m quant_eval run --spec` names it, of weights"
        " alone: rtn-b3-g128, ternary-g128, nvfp4-a16"
    )
    linears: tuple[str, ...] = Field(
        default=(),
        description="names of modules, such as down_proj, whose weights are changed; empty: all of"
        " the decoder blocks",
    )

    @field_validator("spec")
    @classmethod
    def _is_grid(cls, spec: str) -> str:
        import_module(SPECS).weight_grid(spec)
        return spec

    @property
    def grid(self) -> WeightGrid:
        """Return the grid that the spec names."""
        return cast(WeightGrid, import_module(SPECS).weight_grid(self.spec))

    def takes(self, name: str) -> bool:
        """Return whether a linear is changed, by the HF name of its weight."""
        return not self.linears or module_name(name) in self.linears

    @override
    def check(self, model: ModelConfig) -> None:
        """Raise ValueError for a linear that the model lacks, or whose inputs are no groups."""
        names = sorted(hidden_matrices(model))
        modules = dict.fromkeys(map(module_name, names))
        for linear in self.linears:
            if linear not in modules:
                raise ValueError(
                    f"perturbation.linears has {linear!r}, and no linear of the blocks has that"
                    f" name; {take_one_of(linear, modules)}"
                )
        shapes = parameter_shapes(model)
        for name in filter(self.takes, names):
            rows, inputs = shapes[name]
            self.grid.check_sizes(name, (rows, inputs))


class Qat(_OfLinears):
    """Quantization-aware training: weights rounded, with gradients straight through.

    The rounding of Jacob et al. 2018 (arXiv 1712.05877) and the straight-through estimator of
    Bengio et al. 2013 (arXiv 1308.3432): the gradient at the rounded weights updates the exact
    ones.
    """

    kind: Literal["qat"] = "qat"

    @override
    def describe(self) -> str:
        """Return the perturbation in words."""
        return f"QAT {self.spec}"


class Noise(_OfLinears):
    """Random weights of the size of rounding errors, drawn anew for every update.

    Half a step of the spec's grid of integers, at the group of each weight, is the bound of
    `uniform`; `gaussian` has its variance.
    """

    kind: Literal["noise"] = "noise"
    distribution: Literal["gaussian", "uniform"] = "gaussian"
    size: float = Field(default=1.0, gt=0, description="factor of the rounding error's size")

    @model_validator(mode="after")
    def _has_steps(self) -> Self:
        if self.grid.format != "int":
            raise ValueError(
                f"noise has the size of a step between integers, and {self.spec} has other numbers;"
                " give for example rtn-b4-g128, or QAT"
            )
        return self

    @override
    def describe(self) -> str:
        """Return the perturbation in words."""
        size = "" if self.size == 1 else f"{self.size:g} x "
        return f"{self.distribution} noise of {size}{self.spec}"


class Sam(_Perturbation):
    """Sharpness-aware minimization (arXiv 2010.01412): gradients after a step up the loss.

    The step is rho g / |g|, of all weights, norms and embedding included; adaptive (arXiv
    2102.11600): rho w^2 g / |w g|, without that paper's eta. See `train.ascending`.
    """

    PASSES = 2

    kind: Literal["sam"] = "sam"
    rho: float = Field(
        gt=0, description="length of the ascent step, if adaptive in units of the weights"
    )
    adaptive: bool = Field(
        default=False, description="scale the step at each weight by the weight's square"
    )
    sequences: int | None = Field(
        default=None,
        gt=0,
        description="that share an ascent step (m-sharpness), a divisor of batch_size and a"
        " multiple of micro_batch_size x replicas; None: all of a batch",
    )
    every_steps: int = Field(default=1, gt=0, description="ascends at its multiples alone")

    @override
    def _eligible(self, step: int) -> int:
        """Return how many of the updates up to `step` may ascend first."""
        return step // self.every_steps

    @override
    def describe(self) -> str:
        """Return the perturbation in words."""
        kind = "adaptive SAM" if self.adaptive else "SAM"
        parts = [f"{kind} rho {self.rho:g}"]
        if self.sequences:
            parts.append(f"m {self.sequences}")
        if self.every_steps > 1:
            parts.append(f"every {self.every_steps} steps")
        return ", ".join(parts)


Perturbation = Annotated[Qat | Noise | Sam, Field(discriminator="kind")]
