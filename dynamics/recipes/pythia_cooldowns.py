"""Cooldowns of one run at a constant rate to several budgets, after arXiv 2510.06213.

With Pythia on FineWeb-Edu, as the experiments of `dynamics.recipes.pythia` that take a run each.
"""

from typing import Any

from dynamics.recipes.parts import annealed, recipe
from dynamics.recipes.pythia import (
    COOLDOWN_SHARE,
    END,
    SMALL_END,
    SMALL_EVERY,
    STABLE_EVERY,
    cooldown_saves,
    measured,
    run,
    stable_saves,
    tokens_of,
    whole,
)
from study.axes import amount_name
from study.definition import Study
from train.model.presets import PYTHIA_70M
from train.run.config import RunConfig
from train.run.optimization import Lawa

# landscape.py lists checkpoints from 4,000 to 20,000, from 38,000 to 54,000 and so on. The rates in
# the figure of budgets fall from 1.05, 18.9, 36.7, 54.5, 72.4 and 90.2e9 tokens on: every cooldown
# takes 18,000 steps.
BUDGETS, COOLDOWN = (20_000, 54_000, 88_000, 122_000, 156_000, END), 18_000
DOUBLINGS = (23_750, 47_500, 95_000, END)  # of the budget; the paper's are not published
# The cooldowns in the figure of LAWA end at 41, 62, 83 and 100e9 tokens. Their first checkpoints
# are at 22, 43, 64 and 81e9: they take as many steps as those of the learning-rate sweep.
LAWA_ENDS, LAWA_COOLDOWN = (78_000, 118_000, 158_000, END), END // COOLDOWN_SHARE
# The curve of averages begins at 8.4e9 tokens and has some thirty points.
AVERAGED_FROM, AVERAGED_EVERY = 16_000, 8_000
SMALL_ENDS, SMALL_COOLDOWN = (SMALL_END // 2, SMALL_END), 8


def budget_name(schedule: str, end: int, smoke: bool) -> str:
    """Return the name of a run that ends at a budget: wsd-10.5b."""
    return f"{schedule}-{amount_name(tokens_of(end, smoke))}"


def cooldowns(
    ends: tuple[int, ...],
    length: int,
    *,
    smoke: bool,
    every: int = STABLE_EVERY,
    averages: tuple[Lawa, ...] = (),
    **settings: Any,
) -> list[RunConfig]:
    """Return a run at the peak, and from it a linear cooldown of `length` steps to each of `ends`.

    The run trains on to the last of them and has a checkpoint at every one, the control of the
    cooldown that ends there. The others are `every` so many steps. It keeps `averages`.
    """
    starts = [end - length for end in ends]
    saves = {*stable_saves(ends[-1], smoke, every), *starts, *ends}
    stable = run("stable", saves=tuple(sorted(saves)), smoke=smoke, averages=averages, **settings)
    runs = [stable]
    for start, end in zip(starts, ends, strict=True):
        save_steps = cooldown_saves(start, end, smoke)
        name = budget_name("wsd", end, smoke)
        cooled = annealed(stable, name, start=start, save_steps=save_steps)
        runs.append(cooled.model_copy(update={"averages": ()}))
    return runs


@recipe
def pythia_160m_budgets(*, smoke: bool = False) -> Study:
    """Pythia-160M: one run at a constant rate, cooldowns at six budgets from 10B to 100B tokens.

    arXiv 2510.06213, section 4.1. Every cooldown takes 18,000 steps, so that budgets alone differ.
    Ends and starts are those of landscape.py; the talk of the paper names other budgets.
    """
    ends, length = (SMALL_ENDS, SMALL_COOLDOWN) if smoke else (BUDGETS, COOLDOWN)
    return measured(cooldowns(ends, length, smoke=smoke), smoke)


@recipe
def pythia_160m_lawa(*, smoke: bool = False) -> Study:
    """Pythia-160M: averages of weights along a constant rate, and four cooldowns of 20B tokens.

    arXiv 2510.06213, section 5.2, appendix C: LAWA over five weights, 500 steps apart. Its figure
    has averages from 8.4e9 tokens on, and cooldowns to 41, 62, 83 and 100e9 tokens, which are not
    those of the budgets. Checkpoints 8,000 steps apart are this project's choice.
    """
    ends, length = (SMALL_ENDS, SMALL_COOLDOWN) if smoke else (LAWA_ENDS, LAWA_COOLDOWN)
    averages = (Lawa(interval_steps=4 if smoke else 500, window=5),)
    runs = cooldowns(ends, length, smoke=smoke, every=AVERAGED_EVERY, averages=averages)

    first = SMALL_EVERY if smoke else AVERAGED_FROM
    averaged = tuple(step for step in runs[0].save_steps if step >= first)
    return measured(runs, smoke, averaged_steps=averaged)


@recipe
def pythia_70m_kumar(*, smoke: bool = False) -> Study:
    """Pythia-70M at four budgets, each by a cosine of its own and by a cooldown of one run.

    The effect of data volume on quantization (arXiv 2411.04330) under both, as in figure 5 of
    arXiv 2510.06213. A cosine knows its end and takes a run of its own per budget; WSD takes one
    run and a cooldown per budget. Budgets that double from 12.5e9 to 99.6e9 tokens and the peak of
    3e-3 are this project's choice. So are the cooldowns, of 18,000 steps each as in
    `pythia_160m_budgets`: a share of the budget would vary the length of the anneal with it.
    """
    ends, length = (SMALL_ENDS, SMALL_COOLDOWN) if smoke else (DOUBLINGS, COOLDOWN)
    sizes: dict[str, Any] = {"smoke": smoke, "model": PYTHIA_70M}
    cosines = [
        whole(
            budget_name("cosine", end, smoke), schedule="cosine", end=end, cooldown=length, **sizes
        )
        for end in ends
    ]
    return measured([*cosines, *cooldowns(ends, length, **sizes)], smoke)
