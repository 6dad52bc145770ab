"""The settings that decide how one weight is rounded."""

from dataclasses import dataclass
from typing import Literal, Protocol


class RoundingSpec(Protocol):
    """The settings that rounding reads: `quant_eval.specs.QuantSpec` says what each means."""

    @property
    def name(self) -> str:
        """Return the name of the whole quantization, such as gptq-b3-g128."""
        ...

    @property
    def bits(self) -> int:
        """Return the bits of an integer code."""
        ...

    @property
    def format(self) -> str:
        """Return the numbers that weights are rounded to."""
        ...

    @property
    def group_size(self) -> int | None:
        """Return the inputs that share a scale; None: a whole row does."""
        ...

    @property
    def symmetric(self) -> bool | None:
        """Return whether the zero point is fixed."""
        ...

    @property
    def scales(self) -> str | None:
        """Return the dtype that holds the scales."""
        ...

    @property
    def static_activations(self) -> bool:
        """Return whether inputs have one scale, and so weights have too."""
        ...

    @property
    def order(self) -> str | None:
        """Return the order in which columns are rounded."""
        ...

    @property
    def static_groups(self) -> bool | None:
        """Return whether grids are fitted before any column is rounded."""
        ...

    @property
    def damping(self) -> float | None:
        """Return what is added to the Hessian's diagonal, x its mean."""
        ...

    @property
    def kept(self) -> float | None:
        """Return the share of inputs that come last, in a higher precision."""
        ...


@dataclass(frozen=True)
class IntegerSpec:
    """RTN or GPTQ to integers on symmetric grids, columns in natural order."""

    method: Literal["rtn", "gptq"]
    bits: int
    group_size: int
    format: str = "int"
    symmetric: bool = True
    scales: str = "fp32"
    static_activations: bool = False
    kept: None = None

    @property
    def name(self) -> str:
        """Return the name that `quant_eval run --spec` takes.

        >>> IntegerSpec("rtn", 3, 128).name
        'rtn-b3-g128'
        """
        return f"{self.method}-b{self.bits}-g{self.group_size}"

    @property
    def order(self) -> str | None:
        """Return the order in which GPTQ rounds columns."""
        return "natural" if self.method == "gptq" else None

    @property
    def static_groups(self) -> bool | None:
        """Return that GPTQ fits the grid of a group when it is reached."""
        return False if self.method == "gptq" else None

    @property
    def damping(self) -> float | None:
        """Return the damping of GPTQ."""
        return 0.05 if self.method == "gptq" else None
