"""Runs of others: stages of a released model, fetched instead of trained."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from base.frozen import NAME_PATTERN, Frozen
from ckpt_tools.released.revisions import Revision, course_of


class ReleasedRevision(Frozen):
    """One released checkpoint; what no source tells is None."""

    name: str = Field(
        pattern=NAME_PATTERN, description="of the branch on the hub, or of the directory"
    )
    step: int | None = Field(default=None, ge=0, description="None: its source states none")
    tokens: int | None = Field(default=None, ge=0)
    learning_rate: float | None = Field(default=None, ge=0)

    @classmethod
    def of(cls, revision: Revision) -> Self:
        """Return a revision as a study holds it."""
        known = {name: getattr(revision, name) for name in ("step", "tokens", "learning_rate")}
        return cls(name=revision.revision, **known)


class ReleasedSoup(Frozen):
    """A model soup (arXiv 2203.05482): the uniform mean of revisions, of one stage or several."""

    name: str = Field(pattern=NAME_PATTERN)
    members: tuple[str, ...] = Field(
        min_length=2,
        description="RUN/REVISION, in the order of training; the last is of the soup's own stage",
    )

    def describe(self) -> str:
        """Return the soup in words: 'soup of step100, step200 and step300'."""
        *before, last = (member.partition("/")[2] for member in self.members)
        return f"soup of {', '.join(before)} and {last}"


def lawa_name(window: int) -> str:
    """Return the name of averages of so many consecutive revisions: 'lawa5'."""
    return f"lawa{window}"


def describe_lawa(window: int) -> str:
    """Return them in words (arXiv 2306.03241)."""
    return f"LAWA, the mean of {window} consecutive measured revisions of a stage"


class ReleasedRun(Frozen):
    """One stage of a released model, as one line of the figures.

    An average of its weights is one too, at the place of the last ones that it takes in.
    """

    name: str = Field(
        pattern=NAME_PATTERN, description="of the stage, after MODEL- where a study has several"
    )
    model: str = Field(
        pattern=NAME_PATTERN, description="whose stage it is; all of a model are one training"
    )
    source: str = Field(
        description="OWNER/NAME on the hub, or a directory with a directory per revision"
    )
    family: str | None = Field(
        default=None, description="repository whose naming a local directory has"
    )
    schedule: str | None = Field(default=None, description="where its learning rates come from")
    parent: str | None = Field(
        default=None, description="stage of the study whose last weights it starts from"
    )
    restarts: bool = Field(
        default=False,
        description=(
            "its schedule is its own, as in post-training, not the end of its parent's; of an"
            " average, that of its last ingredient is"
        ),
    )
    average_of: tuple[str, ...] = Field(
        default=(), description="what it is an average of; then it is no step of training"
    )
    revisions: tuple[ReleasedRevision, ...] = Field(min_length=1, description="measured")
    config: str | None = Field(
        default=None, description="config.json of the last one, by which costs are estimated"
    )
    windows: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        default=(),
        description=(
            "lengths of LAWA: each revision from the N-th on is averaged with the N - 1 measured"
            " before it"
        ),
    )
    soups: tuple[ReleasedSoup, ...] = Field(default=(), description="that end in this stage")
    ingredients: tuple[ReleasedRevision, ...] = Field(
        default=(), description="fetched for soups alone, not measured"
    )

    @model_validator(mode="after")
    def _rising(self) -> Self:
        for earlier, later in pairwise(self.revisions):
            if earlier.step is None or later.step is None or later.step <= earlier.step:
                raise ValueError(f"the steps of {self.name} do not rise at {later.name}")
        return self

    @model_validator(mode="after")
    def _trained_or_averaged(self) -> Self:
        if self.average_of and self.parent:
            raise ValueError(f"{self.name} is an average; it starts from no stage")
        return self

    @model_validator(mode="after")
    def _averages_fit(self) -> Self:
        if self.windows and max(self.windows) > len(self.revisions):
            raise ValueError(f"{self.name} has fewer revisions than a window of {self.windows}")
        names = [*map(lawa_name, self.windows), *(soup.name for soup in self.soups)]
        if len(set(names)) != len(names):
            raise ValueError(f"two averages of {self.name} share a name among {', '.join(names)}")
        own = {f"{self.name}/{revision.name}" for revision in self.fetched}
        for soup in self.soups:
            if soup.members[-1] not in own:
                raise ValueError(f"{soup.name} ends with {soup.members[-1]}, not in {self.name}")
        return self

    @property
    def fetched(self) -> tuple[ReleasedRevision, ...]:
        """All revisions that are downloaded, by rising step."""
        # Where a source states no step, the stage has one revision.
        return tuple(sorted((*self.revisions, *self.ingredients), key=lambda each: each.step or 0))

    @property
    def stage(self) -> str:
        """The name of the stage without that of the model."""
        return self.name.removeprefix(f"{self.model}-")

    @property
    def total_steps(self) -> int | None:
        """The last of its steps; None where its source states none."""
        return self.revisions[-1].step

    @property
    def course(self) -> str:
        """Its schedule and the stage before it in words, or what it is an average of."""
        return course_of(self.schedule, self.parent, self.average_of)

    @property
    def peak_lr(self) -> float | None:
        """The largest known learning rate; None where none is known."""
        return max(
            (
                revision.learning_rate
                for revision in self.revisions
                if revision.learning_rate is not None
            ),
            default=None,
        )

    @property
    def averages_in_words(self) -> tuple[str, ...]:
        """Its averages in words, with what the first and the last of each window take in."""
        names = [revision.name for revision in self.revisions]
        words = []
        for window in self.windows:
            spans = [f"{names[0]} to {names[window - 1]}", f"{names[-window]} to {names[-1]}"]
            # One window alone is the first and the last.
            words.append(f"{lawa_name(window)} of {', ..., '.join(dict.fromkeys(spans))}")
        return (*words, *(f"{soup.name}, {soup.describe()}" for soup in self.soups))

    def named(self, name: str | None) -> ReleasedRevision:
        """Return the checkpoint of a name."""
        return next(revision for revision in self.fetched if revision.name == name)


def stage_before(runs: Iterable[object], run: ReleasedRun) -> ReleasedRun | None:
    """Return the stage among runs whose last weights a stage starts from; None without one."""
    stages = (each for each in runs if isinstance(each, ReleasedRun))
    return next((stage for stage in stages if stage.name == run.parent), None)


def is_after_pretraining(runs: Iterable[object], run: ReleasedRun) -> bool:
    """Return whether a stage follows pretraining: its place is its number among such stages.

    Those are stages with a schedule of their own, what starts from one, and averages of their
    weights or of unknown ones. Their tokens, where a source states any, are of other data.
    """
    if run.average_of:
        return run.restarts or run.total_steps is None
    stages = tuple(runs)
    before = stage_before(stages, run)
    return run.restarts or (before is not None and is_after_pretraining(stages, before))


def unknown_parents(runs: Iterable[object]) -> Iterator[str]:
    """Yield what is wrong with the parents of stages: each is to be a stage before its own."""
    # A stage without a parent has the parent None, which is always known.
    before = set[str | None]([None])
    for run in runs:
        if isinstance(run, ReleasedRun):
            if run.parent not in before:
                yield f"{run.name} starts from {run.parent}, which is not a stage before it"
            before.add(run.name)


def unknown_ingredients(runs: Iterable[object]) -> Iterator[str]:
    """Yield what is wrong with the members of soups: each is to be a revision of the study."""
    stages = [run for run in runs if isinstance(run, ReleasedRun)]
    known = {f"{run.name}/{revision.name}" for run in stages for revision in run.fetched}
    for run in stages:
        for soup in run.soups:
            for member in soup.members:
                if member not in known:
                    yield f"{soup.name} takes in {member}, which is not a revision of the study"
