"""Trajectories of released models as data: stages, names of revisions, learning rates, sources.

`ckpt_tools.released.revisions` reads the names and evaluates the curves. Every figure comes from
the source named beside it; a figure without a source is None.
"""

from typing import Literal

from base.frozen import Frozen

MAIN = "main"  # branch of the final model, and the stage that it is
B, T = 1e9, 1e12  # tokens

Batches = tuple[tuple[int, int], ...]  # (step, tokens per step from there on), rising


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
        known_until: last step that this describes; None: it describes all.
        then: curve of the steps after that; None: their rate is not documented.
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
    then: "Curve | None" = None


class Stage(Frozen):
    """Revisions that are named alike and follow one schedule.

    Attributes:
        name: such as stage1, stage2, lc-4k-to-32k, it-SFT or main; `pretraining` where there is one
            only.
        template: of the revisions' names; {S}, {S:07} is the step, {K:03} a chunk, {T} a rounded
            number of tokens with its unit.
        ingredient: number of the run among those that were averaged into the final model.
        parent: `line` whose last weights the stage started from.
        restarts: the stage has a schedule of its own, after that of pretraining has ended.
        average_of: what it is an average of: lines, or in words what is not published.
        copies: `line` of which it is a step under another name.
        schedule: its name; None: not known.
        source: where the recipe is written.
        curve: the learning rate; None: not known.
        batches: tokens per step; empty: not known.
        starts_at: tokens when its step 0 began; None: not known.
        at_step: of a name without {S}.
        chunk_steps: of a chunk {K}: chunk 0 ends after as many steps.
        last: its last step, where revisions after it would show another schedule; None: not known.
    """

    name: str
    template: str
    ingredient: int | None = None
    parent: str | None = None
    restarts: bool = False
    average_of: tuple[str, ...] = ()
    copies: str | None = None
    schedule: str | None = None
    source: str | None = None
    curve: Curve | None = None
    batches: Batches = ()
    starts_at: int | None = 0
    at_step: int | None = None
    chunk_steps: int | None = None
    last: int | None = None

    @property
    def line(self) -> str:
        """Return the name of the stage with its ingredient: 'stage2-ingredient1'."""
        return line_of(self.name, self.ingredient)

    def as_main(self, step: int) -> "Stage":
        """Return the branch main, where it is this stage at `step`."""
        main_fields = {"name": MAIN, "template": MAIN, "at_step": step}
        return self.model_copy(update=main_fields | {"copies": self.line, "parent": self.line})


class Trajectory(Frozen):
    """A released model with its revisions.

    Attributes:
        repo: of the hub, or how its repositories are called.
        stages: in the order of training.
        part_of: repository of the model that it became, if another; the tokenizer is there.
        pattern: regular expression of its repositories; None: there is that one.
    """

    repo: str
    stages: tuple[Stage, ...]
    part_of: str | None = None
    pattern: str | None = None


def line_of(stage: str, ingredient: int | None) -> str:
    """Return the name of a stage with its ingredient, if it has several."""
    return stage if ingredient is None else f"{stage}-ingredient{ingredient}"


def main() -> Stage:
    """Return the branch main, where no source says which step of which stage it is."""
    return Stage(name=MAIN, template=MAIN, starts_at=None)


def averaged(
    name: str,
    average_of: tuple[str, ...],
    source: str | None = None,
    longest: tuple[Stage, int] | None = None,
) -> Stage:
    """Return an average with the place of its longest ingredient, a stage and its last step.

    None: the tokens of the ingredients are not known.
    """
    stage = Stage(name=name, template=name, average_of=average_of, source=source, starts_at=None)
    if longest is None:
        return stage
    ingredient, last = longest
    shared = ("restarts", "batches", "starts_at")
    position = {name: getattr(ingredient, name) for name in shared} | {"at_step": last}
    return stage.model_copy(update=position)
