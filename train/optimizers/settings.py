"""The settings and the interface that all optimizers have in common. Needs no torch to import."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self, assert_never

from pydantic import Field, model_validator

from base.frozen import Frozen

if TYPE_CHECKING:  # run.json is read before torch is imported: its errors come at once
    import torch
    from torch import Tensor


class GroupStep(NamedTuple):
    """One update of the parameters of a group."""

    rate: float
    decay: float  # weights are multiplied by 1 - rate x decay
    number: int  # from 1
    epsilon: float = 1.0  # factor of AdamW's


class OptimizerConfig(Frozen, ABC):
    """An optimizer; by default as Ai2 trained OLMo2: all but the token embedding is decayed."""

    # fp32 tensors that are kept for every parameter, in its shape, by their key in checkpoints.
    STATES: ClassVar[tuple[str, ...]]
    # Hidden matrices have those of `MatrixOptimizer.whole_states` in place of these.
    KEEPS_MATRICES_WHOLE: ClassVar[bool] = False
    # Power of the width by which CompleteP scales the rate of hidden matrices: an update of this
    # kind has entries of a fixed size. None where no power is known.
    RATE_BY_WIDTH: ClassVar[float | None] = -1.0

    peak_lr: float = Field(ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay: Literal["adamw", "adamc", "independent"] = Field(
        default="adamw",
        description=(
            "a step at the learning rate r multiplies what is decayed, with W = weight_decay, by"
            " 1 - r W (adamw, arXiv 1711.05101); 1 - r W r / peak_lr in hidden matrices, elsewhere"
            " as adamw (adamc, arXiv 2506.02285); 1 - W r / peak_lr, whatever the peak"
            " (independent, arXiv 2309.14322)"
        ),
    )
    undecayed: tuple[str, ...] = Field(
        default=("embed_tokens",),
        description="parts of HF parameter names that are not decayed; plainLM: ['bias', 'norm']",
    )
    clip_grad_norm: float = Field(default=1.0, gt=0)
    z_loss: float = Field(
        default=1e-5, ge=0, description="times mean(logsumexp(logits)^2), added to the loss"
    )

    @property
    @abstractmethod
    def title(self) -> str:
        """Return name and constants in words: 'AdamW, betas 0.9 and 0.95'."""

    @abstractmethod
    def update(
        self,
        weights: "list[Tensor]",
        gradients: "list[Tensor]",
        states: "dict[str, list[Tensor]]",
        step: GroupStep,
    ) -> None:
        """Update weights and states in place.

        Args:
            weights: fp32, flat: this rank's parts of parameters.
            gradients: of the same shapes, clipped.
            states: for each of `STATES` tensors of the same shapes; zero before the first update.
            step: rate, decay and number of this update.
        """

    def describe(self) -> str:
        """Return the optimizer in words: 'AdamW, betas 0.9 and 0.95, weight decay 0.1 (adamw)'."""
        return f"{self.title}, weight decay {self.weight_decay:g} ({self.decay})"

    def decays(self, hf_name: str) -> bool:
        """Return whether weight decay applies to a parameter, by its HF name."""
        return not any(part in hf_name for part in self.undecayed)

    def decay_at(self, rate: float, *, hidden: bool) -> float:
        """Return the weight decay at a learning rate, in a hidden matrix or elsewhere.

        Defazio's hidden matrices, the normalised layers, are "every linear layer ... excluding the
        output layer".

        A step multiplies weights by 1 - rate x decay.

        Example:
            >>> from train.optimizers.adamw import AdamW
            >>> optimizer = AdamW(peak_lr=1e-3, weight_decay=0.1, decay="adamc")
            >>> optimizer.decay_at(5e-4, hidden=True), optimizer.decay_at(5e-4, hidden=False)
            (0.05, 0.1)
        """
        match self.decay:
            case "adamw":
                return self.weight_decay
            case "adamc":
                decay = self.weight_decay
                return decay * rate / self.peak_lr if hidden else decay
            case "independent":
                # Times the rate this is W r / peak_lr: how high the peak is does not matter.
                return self.weight_decay / self.peak_lr
            case _:
                assert_never(self.decay)

    @model_validator(mode="after")
    def _peak_to_divide_by(self) -> Self:
        if self.decay != "adamw" and self.peak_lr == 0:
            raise ValueError(f"decay {self.decay} divides by peak_lr; set a peak_lr above 0")
        return self


class MatrixOptimizer(OptimizerConfig):
    """An optimizer that updates every hidden matrix as a whole, and the rest by `update`."""

    # A direction has singular values that grow with the square root of the width.
    RATE_BY_WIDTH: ClassVar[float | None] = -0.5

    @abstractmethod
    def whole_states(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of fp32 tensors of a whole hidden matrix [O, I], by key.

        The rank that computes the matrix keeps them. They are zero before the first update.
        """

    @abstractmethod
    def temporaries(self, shape: tuple[int, ...], product_bytes: int) -> int:
        """Return the bytes that the direction of one matrix takes while it is computed.

        Args:
            shape: of the matrix.
            product_bytes: of a number in the run's products.
        """

    @abstractmethod
    def accumulate(self, gradient: "Tensor", states: "dict[str, Tensor]") -> "Tensor":
        """Update the states of a part of a matrix in place; return what `direction` takes of it."""

    @abstractmethod
    def direction_flops(self, shape: tuple[int, ...]) -> float:
        """Return the FLOPs of the products in the direction of a matrix of this shape."""

    @abstractmethod
    def direction(
        self, matrix: "Tensor", dtype: "torch.dtype", states: "dict[str, Tensor]", step: GroupStep
    ) -> "Tensor":
        """Return the direction, times the learning rate subtracted from a whole HF matrix [O, I].

        Args:
            matrix: of what `accumulate` returned.
            dtype: of the run's products.
            states: of this matrix, by the keys of `whole_states`, updated in place.
            step: rate, decay and number of this update.
        """
