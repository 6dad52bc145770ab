"""The torch optimizer that both engines step, whatever row of `train.optimizers` the run has.

The engine replaces the parameters of its groups by this rank's flat fp32 parts of them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.model.parametrization import Scaling
from train.optimizers.settings import GroupStep, OptimizerConfig


class Member(NamedTuple):
    """A parameter, with what decides its learning rate and weight decay."""

    parameter: Tensor
    hidden: bool  # whether it is a hidden matrix
    decayed: bool
    scaling: Scaling

    @property
    def group(self) -> dict[str, Any]:
        """Return what all parameters of a group have in common."""
        return {
            "hidden": self.hidden,
            "decayed": self.decayed,
            "rate_factor": self.scaling.rate,
            "epsilon_factor": self.scaling.epsilon,
        }


class GroupStepOptimizer(torch.optim.Optimizer):
    """An optimizer with one count of steps, in its groups.

    A checkpoint that loads at every layout holds what has the shape of a parameter, and one count
    for all of them. A count for each parameter would also be copied to the GPU at every step.
    """

    def __init__(self, settings: OptimizerConfig, members: Iterable[Member]) -> None:
        self._settings = settings
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for member in members:
            group = groups.setdefault(tuple(member.group.values()), {"params": []} | member.group)
            group["params"].append(member.parameter)
        super().__init__(list(groups.values()), {"lr": 0.0, "weight_decay": 0.0, "step": 0})

    def start_states(self, parts: Iterable[Tensor] = ()) -> None:
        """Set all states to zero, so that a checkpoint can hold them before the first step.

        `parts` are flat parts of parameters that no group holds between two steps.
        """
        for weights in parts:
            self._start(weights, self._settings.STATES)
        for group in self.param_groups:
            is_whole = group["hidden"] and self._settings.KEEPS_MATRICES_WHOLE
            for weights in group["params"]:
                self._start(weights, () if is_whole else self._settings.STATES)

    def _start(self, weights: Tensor, names: Iterable[str]) -> None:
        self.state[weights] = {
            name: torch.zeros_like(weights, dtype=torch.float32, requires_grad=False)
            for name in names
        }

    @property
    def steps(self) -> int:
        """Return the updates so far; the same in every group."""
        (steps,) = {group["step"] for group in self.param_groups}
        return int(steps)

    @steps.setter
    def steps(self, value: int) -> None:
        for group in self.param_groups:
            group["step"] = value

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step, and the weight decay that follows from it."""
        for group in self.param_groups:
            group["lr"] = rate * group["rate_factor"]
            # Times the rate of the group, the same share of a weight whatever the factor is.
            decay = self._settings.decay_at(rate, hidden=group["hidden"]) / group["rate_factor"]
            group["weight_decay"] = decay if group["decayed"] else 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["step"] += 1
            # A matrix that was updated as a whole before this step has no gradient any more.
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not weights:
                continue
            self._settings.update(
                weights,
                [parameter.grad for parameter in weights],
                {
                    name: [self.state[parameter][name] for parameter in weights]
                    for name in self._settings.STATES
                },
                GroupStep(
                    group["lr"], group["weight_decay"], group["step"], group["epsilon_factor"]
                ),
            )
