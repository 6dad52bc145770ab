"""The recipe `trajectory`: a model that others trained, at its released revisions (arXiv 2510.06213, section 3).

Which revisions there are is listed when the study is made; study.json holds them from then on.
"""

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.hf_model import read_hf_config
from ckpt_tools.released.revisions import Revision
from ckpt_tools.released.trajectory import choose, is_local, revisions_of
from study.recipes.olmo2 import TRACES
from study.recipes.parts import (
    EVAL_TOKENS,
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMOKE,
    WEB_METHODS,
    WEB_SPECS,
    web_text,
)
from study.released import ReleasedRevision, ReleasedRun
from study.settings import CurvatureSettings, QuantizationSettings, Study
from study.text import PreparedText
from train.command import UserError

TRAJECTORY = "trajectory"
MAIN = "main"  # stage of the branch main, which repeats the last revision or is a soup
TOKENIZERS = {"HuggingFaceTB/SmolLM3-3B-checkpoints": "HuggingFaceTB/SmolLM3-3B"}  # of a repository without a main
SEQUENCE_LENGTH = 2048  # of curvature, at most: some released models have contexts that no product fits
QUANTIZATION = QuantizationSettings(
    specs=WEB_SPECS,
    methods=WEB_METHODS,
    calibration_sequences=256,
    eval_tokens=EVAL_TOKENS,
    block_tokens=EVAL_TOKENS,
    dtype="bf16",
)


class Released(NamedTuple):
    """What `trajectory` is told.

    Attributes:
        source: OWNER/NAME on the hub, or a directory that holds a directory per revision.
        every: of each stage the first revision, every so manieth behind it, and the last; None: all.
        stage: only this one; None: all but main.
        family: repository whose naming and schedule the revisions have; None: told by the source.
    """

    source: str
    every: int | None = None
    stage: str | None = None
    family: str | None = None


def trajectory(released: Released, profile: str, measured_on: bool = False) -> Study:
    """A line per stage of the model, and per run that was averaged into it; averages of a run's exports are lines too.

    The learning rates are those of the published recipes (ckpt_tools.released). Of curvature there are traces alone:
    vectors over billions of parameters, which eigenvalues take, fill a machine.

    Measured on are C4 and RefinedWeb, with the model's own tokenizer, unless another text takes their place afterwards
    (`measured_on`).

    Raises:
        UserError: the source is no trajectory, the profile is unknown, or a local source comes without a text.
    """
    if profile not in ("full", "smoke"):
        raise UserError(f"recipe {TRAJECTORY} has no profile '{profile}'; take one of: full, smoke")
    local = is_local(released.source)
    found = choose(revisions_of(released.source, released.family), every=released.every, stage=released.stage)
    source = str(Path(released.source).resolve()) if local else released.source
    name = _name(Path(source), found) if local else released.source.partition("/")[2]
    runs = _runs(source, released, found)
    schedules = dict.fromkeys(f"{one.schedule}: {one.source}" for one in found if one.source)
    return Study(
        name=f"{TRAJECTORY}-{name}{SMOKE if profile == 'smoke' else ''}",
        description=f"The released trajectory of {released.source}",
        sources=("arXiv 2510.06213, section 3, appendices A and D", *schedules),
        ranks=1,
        sized_for="any",
        text=_text(released, local and not measured_on),
        runs=runs,
        heading="stage",
        quantization=SMALL_QUANTIZATION if profile == "smoke" else QUANTIZATION,
        curvature=_curvature(Path(source) if local else None, found, profile),
    )


def _curvature(directory: Path | None, found: list[Revision], profile: str) -> CurvatureSettings:
    """Traces, on sequences no longer than the context of a model that is here."""
    settings = SMALL_CURVATURE.model_copy(update={"lambda_max": False}) if profile == "smoke" else TRACES
    length = SEQUENCE_LENGTH
    if directory and (directory / found[0].revision / "config.json").exists():
        length = min(length, read_hf_config(directory / found[0].revision).get("max_position_embeddings", length))
    return settings.model_copy(update={"sequence_length": length})


def _name(directory: Path, found: list[Revision]) -> str:
    """Of a local source: of the run that it holds the exports of, else the directory's; fit for a directory."""
    repos = {one.repo for one in found}
    name = repos.pop() if len(repos) == 1 and directory.name == "hf" else directory.name
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", name)


def _runs(source: str, released: Released, found: list[Revision]) -> tuple[ReleasedRun, ...]:
    """The chosen revisions by stage and ingredient; a line on stderr names what has no place on a line."""
    several = len({one.repo for one in found}) > 1
    runs = []
    for (repo, stage, ingredient), group in groupby(found, key=lambda one: (one.repo, one.stage, one.ingredient)):
        members: list[Revision] = []
        for one in group:
            reason = _left_out(one, members, released.stage)
            if reason:
                print(f"left out: {one.revision} {reason}", file=sys.stderr)
            else:
                members.append(one)
        if not members:
            continue
        parts = (repo.replace("/", "--") if several else "", stage, f"ingredient{ingredient}" if ingredient else "")
        runs.append(
            ReleasedRun(
                name="-".join(part for part in parts if part),
                source=source,
                family=released.family,
                schedule=members[-1].schedule,
                revisions=tuple(map(_revision, members)),
            )
        )
    if not runs:
        raise UserError(f"{released.source} has no revision that states a step; choose another --stage or --source")
    return tuple(runs)


def _left_out(one: Revision, members: list[Revision], stage: str | None) -> str | None:
    if one.step is None:
        return "states no step"
    if one.stage == MAIN and stage != MAIN:
        return f"repeats a revision or averages several; --stage {MAIN} measures it"
    if members and members[-1].step == one.step:
        return f"is of the same step as {members[-1].revision}"
    return None


def _revision(one: Revision) -> ReleasedRevision:
    assert one.step is not None
    return ReleasedRevision(name=one.revision, step=one.step, tokens=one.tokens, learning_rate=one.learning_rate)


def _text(released: Released, unknown: bool) -> PreparedText:
    if unknown:
        raise UserError(
            f"{released.source} is a directory; name with --text what is measured on, such as the study runs/tiny"
        )
    return web_text(TOKENIZERS.get(released.source, released.source))
