"""Named parts of a study: the runs of one experiment, shown by themselves.

A paper has many experiments, and a run may be in several: it is trained and measured once. Each is
a section of the report, with the axes, figures and verdicts of its own runs.
"""

from collections.abc import Collection, Iterator, Sequence

from pydantic import Field

from base.frozen import NAME_PATTERN, Frozen
from study.axes import AnyRun
from study.design import control_among, seeded_name, unperturbed_among
from train.run.config import RunConfig


class Experiment(Frozen):
    """A part of a study."""

    name: str = Field(pattern=NAME_PATTERN, description="of the folders of its figures and tables")
    title: str = Field(description="of its section, such as 'Figure 3: learning rates'")
    runs: tuple[str, ...] = Field(
        min_length=1, description="by name; their parents and controls come with them"
    )
    figures: tuple[str, ...] = Field(
        default=(),
        description="that its section shows, by name, in order; empty: all that its runs can have",
    )
    claims: tuple[str, ...] = Field(
        default=(), description="that are judged in it, by name; empty: all"
    )
    captions: dict[str, str] = Field(
        default={}, description="as those of the study, which they replace"
    )

    def with_seeds(self, seeds: Sequence[int]) -> "Experiment":
        """Return the experiment of every run once per seed, as `study.design.with_seeds` has it."""
        names = tuple(seeded_name(name, seed) for seed in seeds for name in self.runs)
        return self.model_copy(update={"runs": names})

    def judges(self, claim: str) -> bool:
        """Return whether a claim is judged in it."""
        return not self.claims or claim in self.claims

    def shows(self, figure: str) -> bool:
        """Return whether a figure is in its section, if its runs can have it."""
        return not self.figures or figure in self.figures


def problems_of(experiments: Sequence[Experiment], runs: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the experiments of a study with these runs, by name."""
    names = [experiment.name for experiment in experiments]
    if len(set(names)) != len(names):
        yield f"two experiments share a name among {', '.join(names)}"
    for experiment in experiments:
        unknown = [name for name in experiment.runs if name not in runs]
        if unknown:
            yield (
                f"experiment {experiment.name} names run {unknown[0]}, which is not among"
                f" {', '.join(runs)}; correct its runs"
            )


def runs_with_origins(runs: Sequence[AnyRun], names: Collection[str]) -> tuple[AnyRun, ...]:
    """Return runs by name, what they are compared with, and what all of these start from, in order.

    A run starts from its parent, a stage of a released model from the one before it.
    """
    trained = [run for run in runs if isinstance(run, RunConfig)]
    compared = [
        partner
        for run in trained
        if run.name in names
        for partner in (control_among(trained, run), unperturbed_among(trained, run))
    ]
    kept = {*names, *(partner.name for partner in compared if partner)}
    # Parents come before what starts from them, so one pass from the end finds all.
    for run in reversed(runs):
        if run.name in kept:
            kept |= set(_parents(run))
    return tuple(run for run in runs if run.name in kept)


def _parents(run: AnyRun) -> Iterator[str]:
    if isinstance(run, RunConfig):
        if run.branch_from:
            yield run.branch_from.run.removeprefix("../")
    elif run.parent:
        yield run.parent
