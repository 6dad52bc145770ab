"""Settings of what changes the weights that forward and backward see; a part of run.json.

The update is that of the exact weights: `train.perturbing` restores them before it, bit for bit.
"""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, override

from pydantic import Field

from base.frozen import Frozen


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
        before = self.after(anneal_start)
        if before is None:
            return 0
        return max(0, self._eligible(until) - self._eligible(max(after, before)))

    def after(self, anneal_start: int | None) -> int | None:
        """Return the last update before those that may have changed weights; None: it has none."""
        return anneal_start if self.from_step is None else self.from_step - 1

    def _eligible(self, step: int) -> int:
        """Return how many of the updates up to `step` may be active."""
        return step

    @abstractmethod
    def describe(self) -> str:
        """Return the perturbation in words."""


class _OfLinears(_Perturbation):
    """A change of the weights of the blocks' linears by the grid of a spec."""

    spec: str = Field(
        description="rounding to nearest as `python -m quant_eval run --spec` names it"
    )
    linears: tuple[str, ...] = Field(
        default=(),
        description="names of modules, such as down_proj, whose weights are changed; empty: all of"
        " the decoder blocks",
    )

    def takes(self, name: str) -> bool:
        """Return whether a linear is changed, by the HF name of its weight."""
        return not self.linears or name.removesuffix(".weight").rpartition(".")[2] in self.linears


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

    Half a step of the spec's grid is the bound of `uniform`; `gaussian` has its variance.
    """

    kind: Literal["noise"] = "noise"
    distribution: Literal["gaussian", "uniform"] = "gaussian"
    size: float = Field(default=1.0, gt=0, description="factor of the rounding error's size")

    @override
    def describe(self) -> str:
        """Return the perturbation in words."""
        size = "" if self.size == 1 else f"{self.size:g} x "
        return f"{self.distribution} noise of {size}{self.spec}"


class Sam(_Perturbation):
    """Sharpness-aware minimization (arXiv 2010.01412): gradients after a step up the loss.

    The step is rho g / |g|, of all weights; adaptive (arXiv 2102.11600): rho w^2 g / |w g|.
    """

    PASSES = 2

    kind: Literal["sam"] = "sam"
    rho: float = Field(gt=0, description="length of the ascent step")
    adaptive: bool = False
    sequences: int | None = Field(
        default=None,
        gt=0,
        description="that share an ascent step (m-sharpness); None: all of a batch",
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
