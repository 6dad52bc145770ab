"""Averages of the weights kept while training: LAWA windows and exponential moving averages, in slots of the engine.

What an average holds is a function of the step: its members are the weights after every multiple of its interval, from
the first one behind the step it starts at. So a resumed run, whose slots are loaded with its weights, goes on as if it
had never stopped. Initial weights are never a member.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from train.config import RunConfig
from train.engine import Engine
from train.settings import Ema, Lawa

CHUNK_ELEMENTS = 1 << 24  # of a mean, which is summed in fp64


def slot_names(run: RunConfig) -> list[str]:
    """Names of the fp32 copies that the run's averages need: one per member of a LAWA window, one per EMA."""
    names = []
    for average in run.averages:
        names += [f"{average.name}.{member}" for member in range(average.window if isinstance(average, Lawa) else 1)]
    return names


def member_steps(average: Lawa | Ema, start: int, step: int) -> range:
    """The steps whose weights an average holds as of `step`, rising.

    A LAWA window that is not full yet holds the members there are; before the first there is no average.
    """
    interval = average.interval_steps
    first, last = (start // interval + 1) * interval, step // interval * interval
    if isinstance(average, Lawa):
        first = max(first, last - (average.window - 1) * interval)
    return range(first, last + 1, interval)


class Averages:
    """The averages of one run on this rank. Every rank calls every method.

    Attributes:
        starts: for each average by name the step behind which its first member may lie.
    """

    def __init__(self, run: RunConfig, engine: Engine, starts: dict[str, int]) -> None:
        self._run, self._engine, self.starts = run, engine, starts

    def _members(self, average: Lawa | Ema, step: int) -> range:
        return member_steps(average, self.starts[average.name], step)

    def _slot(self, average: Lawa | Ema, step: int) -> list[Tensor]:
        """Where the member of this step lies."""
        member = step // average.interval_steps % average.window if isinstance(average, Lawa) else 0
        return self._engine.slot(f"{average.name}.{member}")

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after update `step` wherever they are a member."""
        for average in self._run.averages:
            if step % average.interval_steps:
                continue
            first = len(self._members(average, step)) == 1
            for kept, shard in zip(self._slot(average, step), self._engine.weights(), strict=True):
                if isinstance(average, Lawa) or first:
                    kept.copy_(shard.weights)
                else:
                    kept.mul_(average.decay).add_(shard.weights, alpha=1 - average.decay)

    def present(self, step: int) -> list[Lawa | Ema]:
        """The averages that have a member as of `step`."""
        return [average for average in self._run.averages if self._members(average, step)]

    def describe(self, average: Lawa | Ema, step: int) -> dict[str, object]:
        """What checkpoint.json says of an average: its settings and `steps`, its members; of an EMA first and last."""
        steps = self._members(average, step)
        listed = list(steps) if isinstance(average, Lawa) else sorted({steps[0], steps[-1]})
        return {**average.model_dump(mode="json"), "steps": listed}

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, average: Lawa | Ema, step: int) -> Iterator[None]:
        """Within the block the model computes with the average as of `step`; then with its own weights, bit for bit."""
        weights = [shard.weights for shard in self._engine.weights()]
        own = [shard.to("cpu", copy=True) for shard in weights]
        steps = self._members(average, step)
        members = [self._slot(average, member) for member in (steps if isinstance(average, Lawa) else steps[-1:])]
        for index, shard in enumerate(weights):
            _mean_into(shard, [member[index] for member in members])
        self._engine.publish_weights()
        yield
        for shard, kept in zip(weights, own, strict=True):
            shard.copy_(kept)
        self._engine.publish_weights()


def _mean_into(target: Tensor, members: list[Tensor]) -> None:
    """The uniform mean, rounded to the target's precision once."""
    for start in range(0, target.numel(), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        total = torch.zeros_like(target[part], dtype=torch.float64)
        for member in members:
            total += member[part]
        target[part] = total / len(members)
