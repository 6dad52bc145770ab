"""Averages of the weights kept while training: LAWA windows and EMAs, in slots of the engine.

An average is a function of the step: its members are the weights after every multiple of its
interval, from the first one after the step it starts at. So a resumed run, whose slots are loaded
with its weights, continues as if it had never stopped. Initial weights are never a member.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

import torch
from torch import Tensor

from train.engine import Engine
from train.run.config import RunConfig
from train.run.optimization import Ema, Lawa

CHUNK_ELEMENTS = 1 << 24  # of a mean, which is summed in fp64


def slot_names(run: RunConfig) -> list[str]:
    """Return names of the slots of a run: one per member of a LAWA window, one per EMA."""
    return [
        f"{average.name}.{member}" for average in run.averages for member in range(average.slots)
    ]


def member_steps(average: Lawa | Ema, start: int, step: int) -> range:
    """Return the steps whose weights an average holds as of `step`, rising.

    A LAWA window that is not full yet holds the members there are; before the first there is no
    average.

    Args:
        average: its interval, and the window of LAWA.
        start: the step after which its first member may be.
        step: of the weights.

    Example:
        >>> list(member_steps(Lawa(interval_steps=10, window=3), start=0, step=47))
        [20, 30, 40]
    """
    interval = average.interval_steps
    # The first multiple after `start`, and the last one up to `step`.
    first, last = (start // interval + 1) * interval, step // interval * interval
    match average:
        case Lawa(window=window):
            first = max(first, last - (window - 1) * interval)
        case Ema():
            pass  # every member since the first has a share in it
        case _:
            assert_never(average)
    return range(first, last + 1, interval)


class Averages:
    """The averages of one run on this rank. Every rank calls every method.

    Attributes:
        starts: for each average by name the step after which its first member may be.
    """

    def __init__(self, run: RunConfig, engine: Engine, starts: dict[str, int]) -> None:
        self._run, self._engine, self.starts = run, engine, starts

    def _members(self, average: Lawa | Ema, step: int) -> range:
        return member_steps(average, self.starts[average.name], step)

    def _slot(self, average: Lawa | Ema, step: int) -> list[Tensor]:
        """Return the slot of the member of this step."""
        # A ring: a new member takes the slot of the oldest.
        member = step // average.interval_steps % average.slots
        return self._engine.slot(f"{average.name}.{member}")

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after update `step` to each average that they are a member of."""
        for average in self._run.averages:
            if step % average.interval_steps:
                continue
            # An EMA starts at its first member, not at 0, and so needs no correction of bias.
            first = len(self._members(average, step)) == 1
            for slot, weights in zip(
                self._slot(average, step), self._engine.weights(), strict=True
            ):
                match average:
                    case Lawa():
                        slot.copy_(weights)
                    case Ema() if first:
                        slot.copy_(weights)
                    case Ema(decay=decay):
                        slot.mul_(decay).add_(weights, alpha=1 - decay)
                    case _:
                        assert_never(average)

    def present(self, step: int) -> list[Lawa | Ema]:
        """Return the averages that have a member as of `step`."""
        return [average for average in self._run.averages if self._members(average, step)]

    def describe(self, average: Lawa | Ema, step: int) -> dict[str, object]:
        """Return an average's entry in checkpoint.json: settings and `steps`, of an EMA two."""
        steps = self._members(average, step)
        match average:
            case Lawa():
                listed = list(steps)
            case Ema():
                listed = sorted({steps[0], steps[-1]})
            case _:
                assert_never(average)
        return {**average.model_dump(mode="json"), "steps": listed}

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, average: Lawa | Ema, step: int) -> Iterator[None]:
        """Compute with the average as of `step` within the block, then with the weights again."""
        weights = self._engine.weights()
        # A copy, as no arithmetic would give the weights back bit for bit.
        saved = [shard.to("cpu", copy=True) for shard in weights]
        steps = self._members(average, step)
        # An EMA has one slot, which as of its last step holds all of its members.
        members = [self._slot(average, member) for member in steps[-average.slots :]]
        for index, shard in enumerate(weights):
            _mean_into(shard, [member[index] for member in members])
        self._engine.publish_weights()
        # Not in a `finally`: publishing meets all ranks, and an error may be of this one alone.
        yield
        for shard, saved_shard in zip(self._engine.weights(), saved, strict=True):
            shard.copy_(saved_shard)
        self._engine.publish_weights()


def _mean_into(target: Tensor, members: list[Tensor]) -> None:
    """Write the uniform mean, rounded to the target's precision once."""
    # By chunks: a sum in fp64 of a whole shard would take twice the memory of the shard.
    for start in range(0, target.numel(), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        total = torch.zeros_like(target[part], dtype=torch.float64)
        for member in members:
            total += member[part]
        target[part] = total / len(members)
