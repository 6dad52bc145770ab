"""The recipe `trajectory`: a released model at its revisions (arXiv 2510.06213, section 3).

Which revisions there are is listed when the study is made; study.json holds them from then on.
"""

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pydantic import Field, ValidationError

from base.errors import UserError, explain_validation
from base.frozen import Frozen
from ckpt_tools.hf.model import read_hf_config
from ckpt_tools.released.revisions import Revision
from ckpt_tools.released.trajectory import choose, is_local, revisions_of
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.recipes.olmo2 import TRACES
from study.recipes.parts import (
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    WEB_QUANTIZATION,
    web_text,
)
from study.released import ReleasedRevision, ReleasedRun

TRAJECTORY = "trajectory"
MAIN = "main"  # stage of the branch main, which repeats the last revision or is a soup
# Of a repository without a main.
TOKENIZERS = {"HuggingFaceTB/SmolLM3-3B-checkpoints": "HuggingFaceTB/SmolLM3-3B"}
SEQUENCE_LENGTH = 2048  # of curvature, at most: products with longer ones fit no machine
QUANTIZATION = WEB_QUANTIZATION.model_copy(update={"block_tokens": WEB_QUANTIZATION.eval_tokens})


class Released(Frozen):
    """The released model that `trajectory` is about: what --set says."""

    source: str = Field(description="OWNER/NAME on the hub, or a directory of revisions")
    every: int | None = Field(
        default=None,
        ge=1,
        description="of each stage every N-th revision, and the last; None: all",
    )
    stage: str | None = Field(default=None, description="only this one; None: all but main")
    family: str | None = Field(
        default=None, description="repository whose naming and schedule the revisions have"
    )


def released_of(settings: Sequence[str]) -> Released:
    """Return the released model that KEY=VALUE settings name; UserError where they do not fit."""
    values = dict(setting.partition("=")[::2] for setting in settings)
    if "source" not in values:
        raise UserError(
            f"{TRAJECTORY} needs a released model; give --set source=OWNER/NAME, such as"
            " allenai/OLMo-2-1124-7B, or a directory of revisions"
        )
    try:
        return Released.model_validate(values)
    except ValidationError as error:
        raise explain_validation("--set", error) from None


def trajectory(released: Released, profile: str, measured_on: bool = False) -> Study:
    """Return a study with a line per stage of the model, and per run that was averaged into it.

    Averages of a run's exports are lines too. The learning rates are those of the published recipes
    (ckpt_tools.released). Curvature is traces alone: vectors over billions of parameters fill a
    machine. Measured on are C4 and RefinedWeb, with the model's own tokenizer, unless another text
    takes their place afterwards (`measured_on`), which a local source needs.
    """
    local = is_local(released.source)
    if local and not measured_on:
        raise UserError(
            f"{released.source} is a directory; name with --text what is measured on, such as the"
            " study runs/tiny"
        )
    revisions = choose(
        revisions_of(released.source, released.family), every=released.every, stage=released.stage
    )
    source = str(Path(released.source).resolve()) if local else released.source
    name = released.source.partition("/")[2]
    if local:  # of exports the name of their run
        repos = {each.repo for each in revisions}
        name = Path(source).name
        name = repos.pop() if len(repos) == 1 and name == "hf" else name
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "-", name)
    schedules = dict.fromkeys(
        f"{each.schedule}: {each.source}" for each in revisions if each.source
    )
    return Study(
        name=f"{TRAJECTORY}-{name}{'-smoke' if profile == 'smoke' else ''}",
        description=f"The released trajectory of {released.source}",
        sources=("arXiv 2510.06213, section 3, appendices A and D", *schedules),
        ranks=1,
        sized_for="any",
        text=web_text(TOKENIZERS.get(released.source, released.source)),
        runs=_runs(source, released, revisions),
        quantization=SMALL_QUANTIZATION if profile == "smoke" else QUANTIZATION,
        curvature=_curvature(Path(source) if local else None, revisions, profile),
    )


def _curvature(
    directory: Path | None, revisions: list[Revision], profile: str
) -> CurvatureSettings:
    """Return settings for traces, on sequences within the context of a model that is here."""
    length = SEQUENCE_LENGTH
    if directory and (directory / revisions[0].revision / "config.json").exists():
        config = read_hf_config(directory / revisions[0].revision)
        length = min(length, config.get("max_position_embeddings", length))
    settings = SMALL_CURVATURE if profile == "smoke" else TRACES
    return settings.model_copy(update={"sequence_length": length, "lambda_max": False})


def _runs(source: str, released: Released, revisions: list[Revision]) -> tuple[ReleasedRun, ...]:
    """Return the chosen revisions by stage and ingredient; print those that have no place."""
    several = len({each.repo for each in revisions}) > 1
    runs = []
    for (repo, stage, ingredient), group in groupby(
        revisions, key=lambda each: (each.repo, each.stage, each.ingredient)
    ):
        # revisions with a place on the axis, in the order of training
        members: list[ReleasedRevision] = []
        for each in group:
            reason = _left_out(each, members, released.stage)
            if reason:
                print(f"left out: {each.revision} {reason}", file=sys.stderr)
                continue
            revision = {"name": each.revision, "step": each.step, "tokens": each.tokens}
            members.append(
                ReleasedRevision.model_validate(revision | {"learning_rate": each.learning_rate})
            )
            schedule = each.schedule

        # named after stage and ingredient, and after the repository where there are several
        if members:
            parts = [repo.replace("/", "--")] * several + [stage]
            parts += [f"ingredient{ingredient}"] * bool(ingredient)
            run = ReleasedRun(
                name="-".join(parts),
                source=source,
                family=released.family,
                schedule=schedule,
                revisions=tuple(members),
            )
            runs.append(run)
    if not runs:
        raise UserError(
            f"{released.source} has no revision that states a step; set another stage or source"
        )
    return tuple(runs)


def _left_out(revision: Revision, members: list[ReleasedRevision], stage: str | None) -> str | None:
    if revision.step is None:
        return "states no step"
    if revision.stage == MAIN and stage != MAIN:
        return f"repeats a revision or averages several; --stage {MAIN} measures it"
    if members and members[-1].step == revision.step:
        return f"is of the same step as {members[-1].name}"
    return None
