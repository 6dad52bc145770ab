"""Names of revisions: the step, tokens and stage in one, and the learning rate from these."""

import re

from base.errors import UserError
from base.frozen import Frozen
from ckpt_tools.released.schedules import Batches, Curve, tokens_after

PLACES = {
    "{S}": r"(?P<number>0|[1-9][0-9]*)",
    "{S:07}": r"(?P<number>[0-9]{7})",
    "{K:03}": r"(?P<number>[0-9]{3})",
    "{T}": r"(?P<count>0|[1-9][0-9]*)(?P<unit>[BT])",
}
UNITS = {"B": 10**9, "T": 10**12}
NAMED_WITHIN = 0.002  # of the tokens, besides a unit


class Revision(Frozen):
    """A checkpoint of a trajectory; a figure without a source is None.

    Attributes:
        repo: of the hub, whose naming and schedule it has; of an export its run.
        revision: its name.
        stage: of training, such as stage1, stage2, lc-4k-to-32k, it-SFT or main; `pretraining`
            where there is one only.
        ingredient: number of the run among those that were averaged into the final model.
        step: as the stage counts: stage 2 of OLMo 2 starts at 0 again, that of SmolLM3 does not.
        tokens: exact, counted like `step`.
        learning_rate: of the schedule at `step`; see `Curve.at`.
        schedule: its name.
        source: where the recipe is written.
    """

    repo: str
    revision: str
    stage: str
    ingredient: int | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    source: str | None = None


class Stage(Frozen):
    """Revisions that are named alike and follow one schedule.

    Attributes:
        name: of the stage.
        template: of the names; {S}, {S:07} is the step, {K:03} a chunk, {T} a rounded number of
            tokens with its unit.
        ingredient: number of the run, where the template has one.
        schedule: its name; None: not known.
        source: where the recipe is written.
        curve: the learning rate; None: not known.
        batches: tokens per step; empty: not known.
        at_step: of a name without {S}.
        chunk_steps: of a chunk {K}: chunk 0 ends after as many steps.
    """

    name: str
    template: str
    ingredient: int | None = None
    schedule: str | None = None
    source: str | None = None
    curve: Curve | None = None
    batches: Batches = ()
    at_step: int | None = None
    chunk_steps: int | None = None

    def read(self, repo: str, revision: str) -> Revision | None:
        """Return the revision of this name if it is named like this stage, else None.

        Raises:
            UserError: it is named like this stage, but has not seen so many tokens.
        """
        parts = re.split(r"(\{[^}]*\})", self.template)
        pattern = "".join(PLACES.get(part) or re.escape(part) for part in parts)
        match = re.fullmatch(pattern, revision)
        if not match:
            return None

        fields, step = match.groupdict(), self.at_step
        if "number" in fields:
            number = int(fields["number"])
            step = number if self.chunk_steps is None else (number + 1) * self.chunk_steps

        # The tokens follow from the step; those in the name are only checked.
        tokens = None if step is None or not self.batches else tokens_after(self.batches, step)
        if tokens is not None and "count" in fields:
            unit = UNITS[fields["unit"]]
            # Names are rounded up, down or to the nearest, even within one family; Apertus's count
            # 4.2M tokens a step instead of 1024 x 4096.
            if abs(int(fields["count"]) * unit - tokens) >= unit + tokens * NAMED_WITHIN:
                raise UserError(
                    f"{revision}: {repo} saw {tokens:,} tokens by step {step} of {self.name}; give"
                    " --family, the repository whose revision it is"
                )

        return Revision(
            repo=repo,
            revision=revision,
            stage=self.name,
            ingredient=self.ingredient,
            step=step,
            tokens=tokens,
            learning_rate=None if self.curve is None or step is None else self.curve.at(step),
            schedule=self.schedule,
            source=self.source,
        )

    def as_main(self, step: int) -> "Stage":
        """Return the branch main, where it is this stage at `step`."""
        return self.model_copy(update={"name": "main", "template": "main", "at_step": step})


def main(schedule: str | None = None, source: str | None = None) -> Stage:
    """Return the branch main, where it is not a step of a stage, or no source says of which."""
    return Stage(name="main", template="main", schedule=schedule, source=source)


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
