"""Revisions of released models: stage, step, tokens and learning rate from a revision's name.

The trajectories are data of their families, `train.model.families`; here their names are read and
their curves evaluated.
"""

import re

from base.errors import UserError
from base.frozen import Frozen
from base.names import take_one_of
from train.model.families import TRAJECTORIES
from train.model.families.released import Batches, Curve, Stage, Trajectory, line_of
from train.run.optimization import share_left

# Places of a template: a step S or a chunk K, padded with zeros if :08 follows, and tokens T.
PLACE = re.compile(r"\{(?:[SK](?::0(?P<width>[1-9]))?|T)\}")
TOKENS = r"(?P<count>0|[1-9][0-9]*)(?P<unit>[KMBT])"
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NAMED_WITHIN = 0.002  # of the tokens, besides a unit
MOST_TOKENS = 2**63 - 1  # what a table holds
TRAINING = "training"  # stage of a run's exports that are not averages
DESCRIBE = "describe it in a file of yours (--family FILE.toml, in a study --set family=FILE.toml)"


class Revision(Frozen):
    """A checkpoint of a trajectory; a figure without a source is None.

    Attributes:
        repo: of the hub, whose naming and schedule it has; of an export its run.
        revision: its name.
        stage, ingredient, parent, restarts, average_of, copies: of its `Stage`.
        step: as the stage counts: stage 2 of OLMo 2 starts at 0 again, that of SmolLM3 does not.
        tokens: since training began, those of the stages before included. They follow from step and
            batch; where no source states the batch, they are those of the name, which are rounded.
        learning_rate: of the schedule at `step`; see `learning_rate`.
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


def trajectory_of(repo: str) -> Trajectory:
    """Return the trajectory of a repository of the hub; UserError for one that is not known."""
    for trajectory in TRAJECTORIES:
        if _has(trajectory, repo):
            return trajectory
    repos = [trajectory.repo for trajectory in TRAJECTORIES]
    raise UserError(f"{repo} is not a known trajectory; {take_one_of(repo, repos)}, or {DESCRIBE}")


def final_repo(repo: str) -> str:
    """Return the repository of the model that the revisions of a repository became: often itself.

    >>> final_repo("HuggingFaceTB/SmolLM3-3B-checkpoints")
    'HuggingFaceTB/SmolLM3-3B'
    """
    return next((each.part_of for each in TRAJECTORIES if _has(each, repo)), None) or repo


def repo_of_directory(name: str) -> str | None:
    """Return the known repository that a directory is named after, as OWNER--NAME or NAME."""
    owners = {trajectory.repo.partition("/")[0] for trajectory in TRAJECTORIES}
    repos = [name.replace("--", "/", 1), *(f"{owner}/{name}" for owner in sorted(owners))]
    return next((repo for repo in repos if any(_has(each, repo) for each in TRAJECTORIES)), None)


def _has(trajectory: Trajectory, repo: str) -> bool:
    return re.fullmatch(trajectory.pattern or re.escape(trajectory.repo), repo) is not None


def parse_revision(repo: str, revision: str, trajectory: Trajectory | None = None) -> Revision:
    """Return stage and step from the name of a revision, with its tokens and learning rate.

    The first 3.9T tokens of this one are those of stage 1:
        >>> parse_revision("allenai/OLMo-2-1124-7B", "stage2-ingredient1-step1000-tokens5B").tokens
        3899217936384

    Without `trajectory` the naming is that of the repository.

    Raises:
        UserError: the repository is unknown, or the name is not one of its revisions.
    """
    trajectory = trajectory or trajectory_of(repo)
    found = find_revision(repo, revision, trajectory)
    if found is None:
        templates = ", ".join(stage.template for stage in trajectory.stages)
        raise UserError(f"{revision} is not a revision of {repo}; give one such as {templates}")
    return found


def find_revision(repo: str, revision: str, trajectory: Trajectory) -> Revision | None:
    """Return the revision that a stage of a trajectory has under this name; None if none has.

    UserError where a stage has it, but not with so many tokens or not so many steps.
    """
    parsed = (_read(stage, repo, revision) for stage in trajectory.stages)
    return next((each for each in parsed if each is not None), None)


def training_order(
    revision: Revision, trajectory: Trajectory | None = None
) -> tuple[int, int, int]:
    """Return a sort key in the order of training: stage, ingredient, step.

    Without `trajectory` that of the repository.
    """
    stages = [stage.name for stage in (trajectory or trajectory_of(revision.repo)).stages]
    return stages.index(revision.stage), revision.ingredient or 0, revision.step or 0


def _read(stage: Stage, repo: str, revision: str) -> Revision | None:
    """Return the revision of this name if it is named like the stage, else None.

    Raises:
        UserError: it is named like the stage, but has not seen so many tokens, or comes after its
            last step.
    """
    match = re.fullmatch(_pattern_of(stage.template), revision)
    if not match:
        return None

    fields, step = match.groupdict(), stage.at_step
    if "number" in fields:
        number = int(fields["number"])
        # Chunks count from 0 and are named when they end.
        step = number if stage.chunk_steps is None else (number + 1) * stage.chunk_steps

    if stage.last is not None and step is not None and step > stage.last:
        raise UserError(f"{revision}: {repo} is known to end at step {stage.last}; {DESCRIBE}")

    return Revision(
        repo=repo,
        revision=revision,
        step=step,
        tokens=_tokens(stage, repo, revision, step, fields),
        learning_rate=None
        if stage.curve is None or step is None
        else learning_rate(stage.curve, step),
        stage=stage.name,
        ingredient=stage.ingredient,
        parent=stage.parent,
        restarts=stage.restarts,
        average_of=stage.average_of,
        copies=stage.copies,
        schedule=stage.schedule,
        source=stage.source,
    )


def _pattern_of(template: str) -> str:
    """Return the regular expression of names that follow a template."""
    pattern, end = "", 0
    for field in PLACE.finditer(template):
        pattern += re.escape(template[end : field.start()])
        number = r"0|[1-9][0-9]{0,17}"  # more digits no table holds
        if width := field["width"]:
            # Padded with zeros to the width, or longer without any.
            number = rf"[0-9]{{{width}}}|[1-9][0-9]{{{width},17}}"
        is_tokens = field[0] == "{T}"
        pattern += TOKENS if is_tokens else f"(?P<number>{number})"
        end = field.end()
    return pattern + re.escape(template[end:])


def _tokens(
    stage: Stage, repo: str, revision: str, step: int | None, fields: dict[str, str]
) -> int | None:
    """Return the tokens since training began; UserError if the name states others."""
    named = int(fields["count"]) * UNITS[fields["unit"]] if "count" in fields else None
    seen = named if step is None or not stage.batches else tokens_after(stage.batches, step)
    if seen is None or stage.starts_at is None:
        return None
    if stage.starts_at + seen > MOST_TOKENS:
        raise UserError(f"{revision}: so many tokens nobody trains on; correct tokens_per_step")
    if named is not None:
        unit = UNITS[fields["unit"]]
        # Names are rounded up, down or to the nearest, even within one family; Apertus's count
        # 4.2M tokens a step instead of 1024 x 4096.
        if abs(named - seen) >= unit + seen * NAMED_WITHIN:
            raise UserError(
                f"{revision}: {repo} saw {seen:,} tokens by step {step} of {stage.name}; name the"
                " family whose revision it is, or correct tokens_per_step"
            )
    return stage.starts_at + seen


def tokens_after(batches: Batches, step: int) -> int:
    """Return the tokens trained on by the end of `step`.

    Example: ten steps of 100 tokens, then two of 200.
        >>> tokens_after(((0, 100), (10, 200)), 12)
        1400
    """
    # A batch size lasts until the next one starts, the last until `step`.
    ends = [start for start, _ in batches[1:]] + [step]
    return sum(
        tokens * max(0, min(step, end) - start)
        for (start, tokens), end in zip(batches, ends, strict=True)
    )


def learning_rate(curve: Curve, step: int) -> float | None:
    """Return the rate that update number `step` used; None where it is not known.

    That is OLMo's convention (allenai/OLMo, olmo/train.py); trainers that set the rate after an
    update, such as Megatron, used it one update later.

    Example: half of a warm-up of 10 steps, its end, and half of a decay of 100.
        >>> curve = Curve(peak=1.0, warmup=10, decay_until=110, shape="linear")
        >>> learning_rate(curve, 5), learning_rate(curve, 10), learning_rate(curve, 60)
        (0.5, 1.0, 0.5)
    """
    if curve.known_until is not None and step > curve.known_until:
        return learning_rate(curve.then, step) if curve.then else None
    if step < curve.warmup:
        return curve.peak * (curve.warmup_from + (1 - curve.warmup_from) * step / curve.warmup)
    start = curve.warmup if curve.decay_from is None else curve.decay_from
    progress = min(1.0, max(0.0, (step - start) / (curve.decay_until - start)))
    share = curve.floor + (1 - curve.floor) * share_left(curve.shape, progress)
    return curve.peak * max(share, curve.least)
