"""A family of the user's own, in TOML: names of revisions, tokens and learning rates of its stages.

[[stages]]
revisions = "step{S}"
tokens_per_step = 4194304
schedule = "cosine"
peak = 3e-4
warmup = 2000
horizon = 100000
floor = 0.1
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from base.errors import UserError, explain_validation
from base.frozen import NAME_PATTERN, Frozen, Showable
from base.names import take_one_of
from ckpt_tools.released.revisions import PLACE, TRAINING, Revision
from ckpt_tools.released.schedule_table import with_table
from train.model.families.released import Batches, Curve, Stage, Trajectory

SUFFIX = ".toml"
MOST_TOKENS = 10**15  # of a step or a position: far more than anybody trains on
# The keys of each schedule: those that it needs, and those that it may have besides.
SCHEDULES: dict[str | None, tuple[set[str], set[str]]] = {
    None: (set(), set()),
    "constant": ({"peak"}, {"warmup", "unit"}),
    "cosine": ({"peak", "horizon"}, {"warmup", "floor", "unit"}),
    "linear": ({"peak", "horizon"}, {"warmup", "floor", "unit"}),
    "wsd": ({"peak", "decay_from", "horizon"}, {"warmup", "floor", "unit", "decay"}),
}
OF_SCHEDULE = set[str]().union(*(keys for parts in SCHEDULES.values() for keys in parts))

Count = Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)]
Amount = Annotated[float, Field(strict=True, ge=0, le=MOST_TOKENS)]  # steps or tokens


def _as_batches(value: Any) -> Any:
    return ((0, value),) if isinstance(value, int) else value


class OwnStage(Frozen):
    """Revisions that are named alike and follow one schedule."""

    name: str = Field(
        default=TRAINING, pattern=NAME_PATTERN, description="of the stage, as figures show it"
    )
    revisions: str = Field(
        description="how they are named: {S} is the step, {S:08} one of eight digits, {T} tokens"
    )
    parent: str | None = Field(
        default=None, description="stage before it whose last weights it starts from"
    )
    restarts: bool = Field(
        default=False, description="its schedule is its own, after that of pretraining has ended"
    )
    starts_at: Count = Field(default=0, description="tokens trained on before its step 0")
    tokens_per_step: Annotated[
        tuple[tuple[Count, Annotated[Count, Field(gt=0)]], ...], BeforeValidator(_as_batches)
    ] = Field(default=(), description="a number, or [step, number] from each such step on")
    table: str | None = Field(
        default=None,
        description="CSV beside the file with step, tokens, learning_rate, in place of the rest",
    )
    schedule: Literal["constant", "cosine", "linear", "wsd"] | None = Field(
        default=None, description="of the learning rate; None: not known"
    )
    unit: Literal["steps", "tokens"] = Field(
        default="steps", description="of warmup, decay_from and horizon, from the stage's step 0"
    )
    peak: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=None, description="the highest learning rate"
    )
    warmup: Amount = Field(default=0.0, description="until the peak is reached, from 0")
    decay_from: Amount | None = Field(default=None, description="of wsd: where its decay begins")
    horizon: Amount | None = Field(default=None, description="where the decay ends")
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.0, description="the end of the decay, as a share of the peak"
    )
    decay: Literal["linear", "cosine", "sqrt"] = Field(
        default="linear", description="of wsd: its shape; sqrt is 1 - sqrt"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        places = re.findall(r"\{.*?\}", self.revisions)
        # A step is needed exactly once, as S; tokens, as T, at most once.
        is_known = all(PLACE.fullmatch(part) and "K" not in part for part in places)
        if not is_known or [part[1] for part in places] not in (["S"], ["S", "T"], ["T", "S"]):
            yield (
                f"revisions {self.revisions!r} does not say where the step is; give one such as"
                " step{S}, with {S:08} for eight digits and {T} for tokens such as 20B"
            )
        elif not re.fullmatch(NAME_PATTERN, PLACE.sub("0", self.revisions)):
            yield (
                f"revisions {self.revisions!r} cannot name directories; take letters, digits and"
                " ._=+- between the places"
            )
        starts = [step for step, _ in self.tokens_per_step]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            yield f"tokens_per_step begins at steps {starts}; give 0 and later ones, rising"

        given = self.model_fields_set
        if self.table and given & {*OF_SCHEDULE, "schedule", "tokens_per_step", "starts_at"}:
            yield "table has tokens and rates by step; leave the other keys of the schedule out"
        needed, allowed = SCHEDULES[self.schedule]
        what = f"schedule {self.schedule!r}" if self.schedule else "a stage without schedule"
        for key in sorted(needed - given):
            yield f"{what} needs {key}; add it"
        for key in sorted((given & OF_SCHEDULE) - needed - allowed):
            yield f"{what} has no {key}; remove it"
        if self.unit == "tokens" and not self.tokens_per_step:
            yield "unit 'tokens' needs tokens_per_step; add it"
        start = self.warmup if self.decay_from is None else self.decay_from
        if self.horizon is not None and not self.warmup <= start < self.horizon:
            yield "warmup, decay_from and horizon do not rise; correct them"

    def as_stage(self, file: str, source: str | None) -> Stage:
        """Return the stage as those of known families are."""
        return Stage(
            name=self.name,
            template=self.revisions,
            parent=self.parent,
            restarts=self.restarts,
            schedule=f"{self.schedule} of {file}" if self.schedule else None,
            source=source,
            curve=self._curve(),
            batches=self.tokens_per_step,
            starts_at=self.starts_at,
        )

    def _curve(self) -> Curve | None:
        if self.peak is None:
            return None
        warmup = self._steps(self.warmup)
        if self.horizon is None:
            # a decay to the peak itself
            return Curve(
                peak=self.peak, warmup=warmup, decay_until=warmup + 1, shape="linear", floor=1.0
            )
        return Curve(
            peak=self.peak,
            warmup=warmup,
            decay_from=None if self.decay_from is None else self._steps(self.decay_from),
            decay_until=self._steps(self.horizon),
            shape="cosine" if self.schedule == "cosine" else self.decay,
            floor=self.floor,
        )

    def _steps(self, amount: float) -> float:
        return steps_of(self.tokens_per_step, amount) if self.unit == "tokens" else amount


def steps_of(batches: Batches, tokens: float) -> float:
    """Return the step, maybe a fraction, by whose end so many tokens were trained on.

    Example: ten steps of 100 tokens, then five and a half of 200.
        >>> steps_of(((0, 100), (10, 200)), 2100)
        15.5
    """
    left = tokens
    for (start, per_step), (end, _) in pairwise(batches):
        if left < (end - start) * per_step:
            return start + left / per_step
        left -= (end - start) * per_step
    start, per_step = batches[-1]
    return start + left / per_step


class OwnFamily(Showable):
    """The content of the file."""

    tokenizer: str | None = Field(
        default=None,
        description="repository, or directory relative to the file; None: that of the source",
    )
    source: str | None = Field(default=None, description="where the recipe is written")
    stages: tuple[OwnStage, ...] = Field(min_length=1, description="in the order of training")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [stage.name for stage in self.stages]
        patterns = [stage.revisions for stage in self.stages]
        for index, stage in enumerate(self.stages):
            if stage.name in names[:index]:
                raise ValueError(f"two stages are named {stage.name}; name each differently")
            if stage.revisions in patterns[:index]:
                raise ValueError(f"two stages have revisions {stage.revisions}; tell them apart")
            if stage.parent is not None and stage.parent not in names[:index]:
                raise ValueError(
                    f"{stage.name} starts from {stage.parent}, which is not a stage before it;"
                    " correct parent"
                )
        return self


class FamilyFile:
    """A family and the file that describes it."""

    def __init__(self, path: Path) -> None:
        """Read the file; UserError, one line, for anything it cannot mean."""
        self.path, self.family = path, _read(path)

    def trajectory(self, repo: str) -> Trajectory:
        """Return the trajectory of a repository or a directory that is of the family."""
        stages = tuple(
            stage.as_stage(self.path.name, self.family.source) for stage in self.family.stages
        )
        return Trajectory(repo=repo, stages=stages)

    @property
    def tokenizer(self) -> str | None:
        """Its tokenizer: a repository, or an absolute path."""
        named = self.family.tokenizer
        beside = self.path.parent / (named or "")
        return str(beside.resolve()) if named and beside.is_dir() else named

    def with_tables(self, revisions: Sequence[Revision]) -> list[Revision]:
        """Return revisions with what the tables of their stages have, see `with_table`."""
        known = list(revisions)
        for stage in self.family.stages:
            of_stage = [each for each in known if each.stage == stage.name]
            if stage.table and of_stage:
                tabled = iter(with_table(of_stage, self.path.parent / stage.table))
                known = [next(tabled) if each.stage == stage.name else each for each in known]
        return known


def family_file(family: str | None) -> FamilyFile | None:
    """Return the file that describes a family; None where it is a known repository, or not given.

    UserError for a file that cannot be read.
    """
    return FamilyFile(Path(family)) if family and family.endswith(SUFFIX) else None


def _read(path: Path) -> OwnFamily:
    try:
        content = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give a file of a family") from None
    except RecursionError:
        raise UserError(f"{path} is not TOML: it is nested too deeply; correct it") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of too many digits
        reason = " ".join(str(error).partition(";")[0].split())
        raise UserError(f"{path} is not TOML: {reason}; correct it") from None
    try:
        return OwnFamily.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] != "extra_forbidden":
            raise explain_validation(str(path), error, OwnFamily) from None
        kind = OwnStage if "stages" in problem["loc"] else OwnFamily
        key = ".".join(map(str, problem["loc"]))
        valid = take_one_of(str(problem["loc"][-1]), kind.model_fields)
        raise UserError(f"{path}: unknown key '{key}'; {valid}") from None
