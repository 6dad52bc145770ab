"""Learning rates and token counts of released models as functions of the step."""

from typing import Literal

from base.frozen import Frozen
from train.run.schedules import share_left

Batches = tuple[tuple[int, int], ...]  # (step, tokens per step from there on), rising


def tokens_after(batches: Batches, step: int) -> int:
    """Return the tokens trained on by the end of `step`.

    Example: ten steps of 100 tokens, then two of 200.
        >>> tokens_after(((0, 100), (10, 200)), 12)
        1400
    """
    ends = [start for start, _ in batches[1:]] + [step]
    return sum(
        tokens * max(0, min(step, end) - start)
        for (start, tokens), end in zip(batches, ends, strict=True)
    )


class Curve(Frozen):
    """A learning rate that rises linearly, stays, and decays.

    Steps may be fractions where a source counts tokens.

    Attributes:
        peak: the highest rate.
        warmup: steps until the peak is reached.
        warmup_from: where the rise starts, as a share of the peak.
        decay_from: step at which the decay starts; None: when the peak is reached.
        decay_until: step at which it ends.
        shape: cosine, linear, or sqrt for 1 - sqrt.
        floor: the end of the decay, as a share of the peak.
        least: the smallest rate, as a share of the peak: the decay is cut off there.
        known_until: last step whose rate is documented; None: all are.
    """

    peak: float
    warmup: float = 0.0
    warmup_from: float = 0.0
    decay_from: float | None = None
    decay_until: float
    shape: Literal["cosine", "linear", "sqrt"]
    floor: float = 0.0
    least: float = 0.0
    known_until: float | None = None

    def at(self, step: int) -> float | None:
        """Return the rate that update number `step` used; None where it is not known.

        That is OLMo's convention (allenai/OLMo, olmo/train.py); trainers that set the rate after an
        update, such as Megatron, used it one update later.

        Example: half of a warm-up of 10 steps, its end, and half of a decay of 100.
            >>> curve = Curve(peak=1.0, warmup=10, decay_until=110, shape="linear")
            >>> curve.at(5), curve.at(10), curve.at(60)
            (0.5, 1.0, 0.5)
        """
        if self.known_until is not None and step > self.known_until:
            return None
        if step < self.warmup:
            return self.peak * (self.warmup_from + (1 - self.warmup_from) * step / self.warmup)
        start = self.warmup if self.decay_from is None else self.decay_from
        progress = min(1.0, max(0.0, (step - start) / (self.decay_until - start)))
        share = self.floor + (1 - self.floor) * share_left(self.shape, progress)
        return self.peak * max(share, self.least)
