"""Names of revisions: the step, tokens and stage in one, and the learning rate from these."""

import re

from base.errors import UserError
from base.frozen import Frozen
from ckpt_tools.released.schedules import Batches, Curve, tokens_after

# Places of a template: a step S or a chunk K, padded with zeros if :08 follows, and tokens T.
PLACE = re.compile(r"\{(?:[SK](?::0(?P<width>[1-9]))?|T)\}")
TOKENS = r"(?P<count>0|[1-9][0-9]*)(?P<unit>[KMBT])"
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NAMED_WITHIN = 0.002  # of the tokens, besides a unit
MAIN = "main"  # branch of the final model, and the stage that it is


class Revision(Frozen):
    """A checkpoint of a trajectory; a figure without a source is None.

    Attributes:
        repo: of the hub, whose naming and schedule it has; of an export its run.
        revision: its name.
        stage: of training, such as stage1, stage2, lc-4k-to-32k, it-SFT or main; `pretraining`
            where there is one only.
        ingredient: number of the run among those that were averaged into the final model.
        parent: `line` whose last weights the stage started from.
        restarts: the stage has a schedule of its own, after that of pretraining has ended.
        average_of: what it is an average of: lines, or in words what is not published.
        copies: `line` of which it is a step under another name.
        step: as the stage counts: stage 2 of OLMo 2 starts at 0 again, that of SmolLM3 does not.
        tokens: since training began, those of the stages before included. They follow from step and
            batch; where no source states the batch, they are those of the name, which are rounded.
        learning_rate: of the schedule at `step`; see `Curve.at`.
        schedule: its name.
        source: where the recipe is written.
    """

    repo: str
    revision: str
    stage: str
    ingredient: int | None = None
    parent: str | None = None
    restarts: bool = False
    average_of: tuple[str, ...] = ()
    copies: str | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    source: str | None = None

    @property
    def line(self) -> str:
        """The name of the stage with its ingredient: 'stage2-ingredient1'."""
        return line_of(self.stage, self.ingredient)

    @property
    def course(self) -> str:
        """Its schedule and the stage before it in words, or what it is an average of."""
        return course_of(self.schedule, self.parent, self.average_of)


def course_of(schedule: str | None, parent: str | None, average_of: tuple[str, ...]) -> str:
    """Return the schedule of a stage and the stage before it in words, or its ingredients."""
    if average_of:
        return f"average of {', '.join(average_of)}"
    return (schedule or "schedule unknown") + (f", after {parent}" if parent else "")


def line_of(stage: str, ingredient: int | None) -> str:
    """Return the name of a stage with its ingredient, if it has several."""
    return stage if ingredient is None else f"{stage}-ingredient{ingredient}"


def _pattern_of(template: str) -> str:
    """Return the regular expression of names that follow a template."""
    pattern, end = "", 0
    for place in PLACE.finditer(template):
        pattern += re.escape(template[end : place.start()])
        number = r"0|[1-9][0-9]*"
        if width := place["width"]:
            number = rf"[0-9]{{{width}}}|[1-9][0-9]{{{width},}}"
        is_tokens = place[0] == "{T}"
        pattern += TOKENS if is_tokens else f"(?P<number>{number})"
        end = place.end()
    return pattern + re.escape(template[end:])


class Stage(Frozen):
    """Revisions that are named alike and follow one schedule.

    Attributes:
        name: of the stage.
        template: of the names; {S}, {S:07} is the step, {K:03} a chunk, {T} a rounded number of
            tokens with its unit. See `PLACE`.
        ingredient: number of the run, where the template has one.
        parent, restarts, average_of, copies: see `Revision`.
        schedule: its name; None: not known.
        source: where the recipe is written.
        curve: the learning rate; None: not known.
        batches: tokens per step; empty: not known.
        starts_at: tokens when its step 0 began; None: not known.
        at_step: of a name without {S}.
        chunk_steps: of a chunk {K}: chunk 0 ends after as many steps.
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

    def read(self, repo: str, revision: str) -> Revision | None:
        """Return the revision of this name if it is named like this stage, else None.

        Raises:
            UserError: it is named like this stage, but has not seen so many tokens.
        """
        match = re.fullmatch(_pattern_of(self.template), revision)
        if not match:
            return None

        fields, step = match.groupdict(), self.at_step
        if "number" in fields:
            number = int(fields["number"])
            step = number if self.chunk_steps is None else (number + 1) * self.chunk_steps

        return Revision(
            repo=repo,
            revision=revision,
            step=step,
            tokens=self._tokens(repo, revision, step, fields),
            learning_rate=None if self.curve is None or step is None else self.curve.at(step),
            stage=self.name,
            ingredient=self.ingredient,
            parent=self.parent,
            restarts=self.restarts,
            average_of=self.average_of,
            copies=self.copies,
            schedule=self.schedule,
            source=self.source,
        )

    def _tokens(
        self, repo: str, revision: str, step: int | None, fields: dict[str, str]
    ) -> int | None:
        """Return the tokens since training began; UserError if the name states others."""
        named = int(fields["count"]) * UNITS[fields["unit"]] if "count" in fields else None
        own = named if step is None or not self.batches else tokens_after(self.batches, step)
        if own is None or self.starts_at is None:
            return None
        if named is not None:
            unit = UNITS[fields["unit"]]
            # Names are rounded up, down or to the nearest, even within one family; Apertus's count
            # 4.2M tokens a step instead of 1024 x 4096.
            if abs(named - own) >= unit + own * NAMED_WITHIN:
                raise UserError(
                    f"{revision}: {repo} saw {own:,} tokens by step {step} of {self.name}; name the"
                    " family whose revision it is"
                )
        return self.starts_at + own

    def tokens_at(self, step: int) -> int:
        """Return the tokens since training began, by the end of a step."""
        assert self.starts_at is not None
        return self.starts_at + tokens_after(self.batches, step)

    def as_main(self, step: int) -> "Stage":
        """Return the branch main, where it is this stage at `step`."""
        own = {"name": MAIN, "template": MAIN, "at_step": step}
        line = line_of(self.name, self.ingredient)
        return self.model_copy(update=own | {"copies": line, "parent": line})


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
    place = {"batches": ingredient.batches, "starts_at": ingredient.starts_at, "at_step": last}
    return stage.model_copy(update=place)


class Family(Frozen):
    """A released model with its trajectory.

    Attributes:
        repo: of the hub, or how its repositories are called.
        stages: in the order of training.
        pattern: regular expression of its repositories; None: there is that one.
    """

    repo: str
    stages: tuple[Stage, ...]
    pattern: str | None = None

    def has(self, repo: str) -> bool:
        """Return whether a repository is of this family."""
        return re.fullmatch(self.pattern or re.escape(self.repo), repo) is not None

    def parse(self, repo: str, revision: str) -> Revision:
        """Return the revision of this name; see `registry.parse_revision`."""
        for stage in self.stages:
            parsed = stage.read(repo, revision)
            if parsed is not None:
                return parsed
        templates = ", ".join(stage.template for stage in self.stages)
        raise UserError(f"{revision} is not a revision of {repo}; give one such as {templates}")

    def order(self, revision: Revision) -> tuple[int, int, int]:
        """Return a sort key in the order of training: stage, ingredient, step."""
        stages = [stage.name for stage in self.stages]
        return stages.index(revision.stage), revision.ingredient or 0, revision.step or 0
