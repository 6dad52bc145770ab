"""The recipe `trajectory`: a released model at its revisions (arXiv 2510.06213, section 3).

Which revisions there are is listed when the study is made; study.json holds them from then on.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from base.errors import UserError, explain_validation
from base.frozen import Frozen
from base.settings import check_path, name_with, path_of
from ckpt_tools.released.before import check_ends, tokenizer_sha256
from ckpt_tools.released.own_family import family_file
from ckpt_tools.released.revisions import Revision, final_repo
from ckpt_tools.released.trajectory import (
    MOST_NAMED,
    choose,
    is_local,
    revisions_of,
    say_left_out,
    sources_of,
)
from dynamics.recipes.captions import of_released
from dynamics.recipes.olmo2 import TRACES
from dynamics.recipes.released_averages import described, with_averages
from dynamics.recipes.web import WEB_CRITICAL, WEB_QUANTIZATION, web_text
from quant_eval.specs import parse_spec
from study.axes import AnyRun
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.changed import OF_RECIPE, with_study_settings
from study.recipes.parts import (
    SMALL_CRITICAL,
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    recipe_of_settings,
)
from study.recipes.presets import PRESET
from study.released import ReleasedRevision, ReleasedRun, is_after_pretraining
from train.model.families import FAMILIES
from train.model.families.released import MAIN

TRAJECTORY = "trajectory"
CHOOSING = ("every", "stage", "averages")  # what of a source is measured, as the name says
SEQUENCE_LENGTH = 2048  # of curvature, at most: products with longer ones fit no machine
QUANTIZATION = WEB_QUANTIZATION.model_copy(update={"block_tokens": WEB_QUANTIZATION.eval_tokens})


class Released(Frozen):
    """The released models that `trajectory` is about: what --set says."""

    source: str = Field(
        description="OWNER/NAME on the hub, or a directory of revisions; several with commas"
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="of each stage every N-th revision, and the last; None: all",
    )
    stage: str | None = Field(
        default=None,
        description="only this one; None: all, and main where it is no revision of another name",
    )
    family: str | None = Field(
        default=None,
        description="repository whose naming and schedule the revisions have, or your FILE.toml",
    )
    averages: str | None = Field(
        default=None,
        description=(
            "lawa5 for the mean of each five consecutive measured revisions of a stage,"
            " NAME:REVISION:REVISION for a soup; several with commas"
        ),
    )


class Source(NamedTuple):
    """A repository of the hub or a directory, with the revisions of it that are measured."""

    place: str  # of a directory the absolute path
    revisions: list[Revision]
    listed: list[Revision]  # all that there are
    configs: dict[str, str]  # config.json of the first and last revision of each stage

    @property
    def directory(self) -> Path | None:
        """The directory; None for a repository."""
        return Path(self.place) if is_local(self.place) else None


def released_of(settings: Sequence[str]) -> Released:
    """Return the released model that PATH=VALUE settings name; UserError where they do not fit.

    Others are of the study.
    """
    # A setting is of the released model, or else of the study that is made of it.
    of_study = (key for key in Study.model_fields if key not in OF_RECIPE)
    fields = (*Released.model_fields, PRESET, *of_study)
    for setting in settings:
        if path_of(setting).partition(".")[0] not in fields:
            check_path(setting, fields)
    values = {
        key: value
        for key, _, value in (setting.partition("=") for setting in settings)
        if key in Released.model_fields
    }
    if "source" not in values:
        raise UserError(
            f"{TRAJECTORY} needs a released model; give --set source=OWNER/NAME, such as"
            " allenai/OLMo-2-1124-7B, or a directory of revisions"
        )
    try:
        return Released.model_validate(values)
    except ValidationError as error:
        raise explain_validation("--set", error, Released) from None


@recipe_of_settings
def trajectory(*, smoke: bool, settings: Sequence[str], on_text: bool) -> Study:
    """Released models at their revisions, with --set source=OWNER/NAME or a directory."""
    study = trajectory_of(released_of(settings), smoke=smoke, on_text=on_text)
    of_study = tuple(each for each in settings if path_of(each) not in Released.model_fields)
    study = with_study_settings(study, of_study) if of_study else study
    _check_libraries(study)
    return study


def trajectory_of(released: Released, *, smoke: bool, on_text: bool) -> Study:
    """Return a study with a line per stage of a model, and per run that was averaged into it.

    A stage names the one whose last weights it starts from. Averages are lines of their own, at the
    tokens of their last ingredient. The learning rates are those of the published recipes
    (ckpt_tools.released). Curvature is traces alone: vectors over billions of parameters fill a
    machine. Measured on are C4 and RefinedWeb, with the model's own tokenizer, unless another text
    takes their place afterwards (`on_text`), which a local source needs.
    """
    sources = [_source(place, released, on_text=on_text) for place in _places(released.source)]
    check_tokenizers(sources)
    runs = _runs(released, sources)
    _say_unplaced(runs)
    averages = ""
    if released.averages is not None:
        listed = {source.place: source.listed for source in sources}
        runs = with_averages(runs, listed, released.averages)
        averages = described(released.averages)
    known = [source for each in sources for source in sources_of(each.revisions)]
    shown = " and ".join(_places(released.source))
    first, own = sources[0], family_file(released.family)
    curvature = _curvature(runs, smoke=smoke)
    critical = SMALL_CRITICAL if smoke else WEB_CRITICAL
    name = f"{TRAJECTORY}-{'+'.join(map(_short_name, sources))}{'-smoke' if smoke else ''}"
    chosen = released.model_dump(include=set(CHOOSING), exclude_none=True)
    return Study(
        name=name_with(name, ((key, str(value)) for key, value in chosen.items())),
        description=f"The released trajectory of {shown}{averages}",
        sources=("arXiv 2510.06213, section 3, appendices A and D", *dict.fromkeys(known)),
        ranks=1,
        sized_for="any",
        text=web_text((own and own.tokenizer) or final_repo(first.place)),
        runs=runs,
        captions=of_released(
            {each.repo for of in sources for each in of.revisions},
            averaged=released.averages is not None,
        ),
        quantization=_fitting(SMALL_QUANTIZATION if smoke else QUANTIZATION, runs),
        curvature=curvature,
        critical=critical.model_copy(update={"sequence_length": curvature.sequence_length}),
    )


def _places(source: str) -> list[str]:
    """Return the repositories and directories of --set source; UserError for one given twice."""
    places = [source] if Path(source).is_dir() else [part.strip() for part in source.split(",")]
    if "" in places:
        raise UserError(f"--set source={source} has an empty name; leave out a comma, or name it")
    for place, count in Counter(places).items():
        if count > 1:
            raise UserError(f"--set source=... names {place} {count} times; name it once")
    return places


def _source(place: str, released: Released, *, on_text: bool) -> Source:
    """Return the chosen revisions of a source, those that can be measured and are no repetition."""
    local = is_local(place)
    if local and not on_text:
        raise UserError(
            f"{place} is a directory; name with --text what is measured on, such as the study"
            " runs/tiny"
        )
    listed = revisions_of(place, released.family)
    revisions = _placed(choose(listed, every=released.every, stage=released.stage), released.stage)
    configs = check_ends(place, revisions)
    return Source(str(Path(place).resolve()) if local else place, revisions, listed, configs)


def _unfit(specs: Iterable[str], runs: Iterable[AnyRun]) -> dict[str, str]:
    """Return the specs whose library does not round these models right, with the reason."""
    configs = {run.config for run in runs if isinstance(run, ReleasedRun) and run.config}
    classes = {FAMILIES[json.loads(config)["model_type"]].architecture for config in configs}
    reasons = {}
    for spec in specs:
        parsed = parse_spec(spec)
        if parsed.architectures and (wrong := sorted(classes.difference(parsed.architectures))):
            reasons[spec] = f"{parsed.library} does not quantize {wrong[0]} right"
    return reasons


def _fitting(settings: QuantizationSettings, runs: Iterable[AnyRun]) -> QuantizationSettings:
    """Return the recipe's settings without methods that do not fit; a line names them."""
    unfit = _unfit(settings.methods, runs)
    if unfit:
        reason = next(iter(unfit.values()))
        print(f"left out of the methods: {', '.join(unfit)}, as {reason}", file=sys.stderr)
    methods = tuple(spec for spec in settings.methods if spec not in unfit)
    return settings.model_copy(update={"methods": methods})


def _check_libraries(study: Study) -> None:
    """Raise UserError for a spec, as settings name it, that does not fit the models."""
    for spec, reason in _unfit(study.measured_specs, study.runs).items():
        raise UserError(
            f"spec {spec}: {reason}; take this project's own, --set"
            ' \'quantization.specs=["gptq-b3-g128-actorder", "gptq-b4-g128-actorder"]\', and where'
            " tasks are asked the same of tasks.specs"
        )


def check_tokenizers(sources: Sequence[Source]) -> None:
    """Raise UserError unless several sources have one tokenizer, to the byte.

    A study has one text in tokens, and losses per token of other tokens are no comparison.
    """
    if len(sources) < 2:
        return
    hashes = {}
    for source in sources:
        last = source.revisions[-1].revision
        hashes[source.place] = tokenizer_sha256(source.place, last)
        if hashes[source.place] is None:
            raise UserError(
                f"{source.place} has no tokenizer.json at {last}, so its tokenizer cannot be"
                " compared; measure it in a study of its own"
            )
    first, *others = hashes
    for other in others:
        if hashes[other] != hashes[first]:
            raise UserError(
                f"{other} has another tokenizer than {first}, and a study has one text in tokens;"
                " make a study of each"
            )


def _short_name(source: Source) -> str:
    """Return what a study of the source is called; of exports the name of their run."""
    if source.directory is None:
        return source.place.partition("/")[2]
    repos = {each.repo for each in source.revisions}
    name = source.directory.name
    name = repos.pop() if len(repos) == 1 and name == "hf" else name
    return _name(name)


def _curvature(runs: Iterable[ReleasedRun], *, smoke: bool) -> CurvatureSettings:
    """Return settings for traces, on sequences within the context of every model."""
    contexts = (json.loads(run.config).get("max_position_embeddings") for run in runs if run.config)
    length = min([SEQUENCE_LENGTH, *filter(None, contexts)])
    settings = SMALL_CURVATURE if smoke else TRACES
    return settings.model_copy(update={"sequence_length": length, "lambda_max": False})


def _placed(revisions: list[Revision], stage: str | None) -> list[Revision]:
    """Return the revisions without those that repeat others or that no source says anything of.

    A line on stderr says which are left out.
    """
    reasons = dict(_left_out(revisions, stage))
    say_left_out(reasons, len(revisions))
    chosen = [each for each in revisions if each.revision not in reasons]
    if not chosen:
        raise UserError("no revision is left; set another stage or source")
    return chosen


def _say_unplaced(runs: Sequence[ReleasedRun]) -> None:
    """Print a line on stderr about revisions that have no place along training."""
    placed = [run for run in runs if not is_after_pretraining(runs, run)]
    unknown = [each.name for run in placed for each in run.revisions if each.tokens is None]
    if unknown:
        listed = ", ".join(unknown[:MOST_NAMED]) + ", ..." * (len(unknown) > MOST_NAMED)
        total = sum(len(run.revisions) for run in runs)
        print(
            f"{len(unknown)} of {total} revisions are measured without a place in figures along"
            f" training, as no source states their tokens: {listed}",
            file=sys.stderr,
        )


def _left_out(revisions: list[Revision], stage: str | None) -> Iterator[tuple[str, str]]:
    """Yield the revisions that are left out, and why."""
    sizes = Counter((each.repo, each.line) for each in revisions)
    # Reversed, so that the first revision of a step is the one that stays in the dict.
    by_step = {(each.repo, each.line, each.step): each.revision for each in reversed(revisions)}
    for each in revisions:
        first = by_step[each.repo, each.line, each.step]
        copied = by_step.get((each.repo, each.copies or "", each.step))
        if each.step is None and sizes[each.repo, each.line] > 1:
            yield each.revision, "states no step"
        elif each.revision != first:
            yield each.revision, f"is of the same step as {first}"
        # main would be measured twice where it is a copy of another revision.
        elif each.stage == MAIN and stage is None and copied:
            yield each.revision, f"repeats {copied}; --set stage={MAIN} measures it"
        elif each.stage == MAIN and stage is None and each.step is None and not each.average_of:
            unknown = "no source says which step it is"
            yield each.revision, f"{unknown}; --set stage={MAIN} measures it"


def _runs(released: Released, sources: Sequence[Source]) -> tuple[ReleasedRun, ...]:
    """Return the chosen revisions by stage and ingredient, each after the stage it starts from."""
    repos = [each.repo for source in sources for each in source.revisions]
    models = _models(repos)
    several = len(set(models.values())) > 1
    runs: dict[str, ReleasedRun] = {}
    for source in sources:
        # A download asks for it where names are read again, of directories without a record.
        is_repo = source.directory is not None and not family_file(released.family)
        family = released.family if is_repo else None
        # `groupby` joins neighbours alone: the revisions of a line have to come together.
        for (repo, line), group in groupby(source.revisions, lambda each: (each.repo, each.line)):
            members = list(group)
            prefix = f"{models[repo]}-" * several
            name, parent = f"{prefix}{line}", f"{prefix}{members[0].parent}"
            if name in runs:
                raise UserError(
                    f"{runs[name].source} and {source.place} both hold {line} of {models[repo]};"
                    " name one of them"
                )
            runs[name] = ReleasedRun(
                name=name,
                model=models[repo],
                source=source.place,
                family=family,
                schedule=members[-1].schedule,
                # A stage that was not chosen is no parent.
                parent=parent if parent in runs else None,
                restarts=members[0].restarts,
                average_of=members[0].average_of,
                config=source.configs.get(members[-1].revision),
                revisions=tuple(map(ReleasedRevision.of, members)),
            )
    return tuple(runs.values())


def _models(repos: Iterable[str]) -> dict[str, str]:
    """Return the models that repositories are of: without the owner where that tells them apart.

    Checkpoints in a repository beside that of the final model are of one model with it.
    """
    finals = {repo: final_repo(repo) for repo in repos}
    shorts = Counter(repo.rpartition("/")[2] for repo in set(finals.values()))
    return {
        repo: _name(final.rpartition("/")[2] if shorts[final.rpartition("/")[2]] == 1 else final)
        for repo, final in finals.items()
    }


def _name(text: str) -> str:
    """Return a text as it can name a directory: OWNER/NAME as OWNER--NAME."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text.replace("/", "--"))
