"""The definition of a study: its text, its runs and its measurements; see `study.recipes`."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, Tag, model_validator

from base.errors import UserError
from base.files import write_sealed
from base.frozen import NAME_PATTERN, Showable, fingerprint
from base.reading import as_model, read_sealed
from curvature.settings import LineSettings, PlaneSettings, PredictionSettings
from quant_eval.settings import OutlierSettings
from study.axes import AnyRun, Axis, Varied, axes_of, text_of, varied_of
from study.design import Group, control_among, equal_runs, replicates_of, unperturbed_among
from study.experiments import Experiment, problems_of, runs_with_origins
from study.measurements.critical import CRITICAL
from study.measurements.curvature import CURVATURE, CurvatureSettings
from study.measurements.kind import Kind
from study.measurements.outliers import OUTLIERS
from study.measurements.planes import (
    PCA,
    PLANE,
    BranchedRun,
    BranchedRuns,
    Planes,
    ResolvedPlane,
)
from study.measurements.quantization import (
    BLOCKS,
    METHODS_AT_THE_END,
    QUANTIZE,
    QuantizationSettings,
)
from study.measurements.sizes import misfits
from study.measurements.step import SLICE, STEP, Along
from study.measurements.tasks import TASKS, TasksSettings
from study.paths import MeasuredModel, hf_directory, last_model, released_models
from study.planes import NamedPlane, StudyPoint, point_of
from study.released import (
    ReleasedRun,
    stage_before,
    unknown_ingredients,
    unknown_parents,
)
from study.soups import SoupSettings
from study.text_kinds import Text
from train.run.config import RunConfig

Seeds = Literal["every seed", "first seed"]
FEWEST_OF_PLANE = 3  # checkpoints that can span the plane of a trajectory

AnySettings = (
    QuantizationSettings
    | CurvatureSettings
    | PredictionSettings
    | PlaneSettings
    | LineSettings
    | OutlierSettings
    | TasksSettings
)


def _whose(run: Any) -> str:
    if isinstance(run, ReleasedRun) or (isinstance(run, dict) and "revisions" in run):
        return "released"
    return "trained"


Run = Annotated[
    Annotated[RunConfig, Tag("trained")] | Annotated[ReleasedRun, Tag("released")],
    Discriminator(_whose),
]  # so that what is wrong with a run is said of that kind of run alone


class Study(Showable):
    """One study, resolved: what is trained and measured; the content of study.json.

    A run is trained here, from scratch or from a checkpoint of another run of the study
    (`branch_from`), or it is a stage of a released model.
    """

    name: str = Field(pattern=NAME_PATTERN)
    description: str
    sources: tuple[str, ...] = Field(default=(), description="where the recipe's figures come from")
    ranks: int = Field(gt=0, description="processes of one training run on the CPU of one machine")
    sized_for: Literal["cpu", "cuda", "any"] = Field(
        default="cuda",
        description="what the study runs on by default; any: GPUs where there are",
    )
    text: Annotated[Text, Field(discriminator="kind")]
    settings: tuple[str, ...] = Field(
        default=(), description="PATH=VALUE, by which it differs from its recipe"
    )
    runs: tuple[Run, ...] = Field(min_length=1)
    labels: dict[str, str] = Field(
        default={}, description="of runs, by name, in place of their values on the axes"
    )
    captions: dict[str, str] = Field(
        default={},
        description=(
            "how the caption of a figure begins, by the figure's name, such as 'Figure 3a of"
            " arXiv:2510.06213'"
        ),
    )
    experiments: tuple[Experiment, ...] = Field(
        default=(), description="its parts, in the order of the report; empty: the whole is one"
    )
    quantization: QuantizationSettings
    curvature: CurvatureSettings | None = Field(default=None, description="None: not measured")
    step: PredictionSettings = Field(
        default=PredictionSettings(),
        description="of the curvature along the steps of `quantization.by_block`",
    )
    slice: PlaneSettings = Field(
        default=PlaneSettings(),
        description="of the loss on the plane that the first of them spans, and on `planes`",
    )
    planes: tuple[NamedPlane, ...] = Field(
        default=(), description="through three models each, which may be of several runs"
    )
    pca: PlaneSettings | None = Field(
        default=None,
        description=(
            "of the loss on the plane of the first two principal components of each run with three"
            " checkpoints that others branch from; these are projected. Two losses of every"
            " checkpoint come with those of the grid. None: not measured"
        ),
    )
    critical: LineSettings | None = Field(
        default=None,
        description="None: the loss along the moves between checkpoints is not measured",
    )
    outliers: OutlierSettings | None = Field(default=None, description="None: not measured")
    tasks: TasksSettings | None = Field(default=None, description="None: not measured")
    averaged_steps: tuple[int, ...] = Field(
        default=(),
        description=(
            "steps at which the averages kept in training are measured as weights are, but for"
            " curvature, which `curvature.averages` decides"
        ),
    )
    soups: tuple[SoupSettings, ...] = Field(
        default=(), description="made of each run that saves their steps"
    )
    averaged: Seeds = Field(
        default="every seed", description="runs of which averages and soups are measured"
    )
    detailed: Seeds = Field(
        default="every seed",
        description="runs of which more is measured than quantization and outliers",
    )

    @cached_property
    def trained(self) -> tuple[RunConfig, ...]:
        """The runs that the study trains itself."""
        return tuple(run for run in self.runs if isinstance(run, RunConfig))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # The first problem alone is raised: the others may follow from it.
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        names = [run.name for run in self.runs]
        if len(set(names)) != len(names):
            yield f"two runs share a name among {', '.join(names)}"
        if not set(self.labels) <= set(names):
            yield f"labels name a run that is not among {', '.join(names)}; correct labels"
        yield from equal_runs(self.runs, self.settings)
        labels = [self.label_of(run) for run in self.runs]
        if len(set(labels)) != len(labels):
            yield f"two runs share a label among {', '.join(labels)}; correct labels"
        yield from problems_of(self.experiments, names)

        saved = {step for run in self.trained for step in run.save_steps}
        for step in sorted(set(self.averaged_steps) - saved):
            yield f"averages are to be measured at step {step}, no run saves one there"
        for soup in self.soups:
            if not any(map(soup.is_of, self.trained)):
                yield f"{soup.name} takes in steps {list(soup.steps)}, which no run saves all"
        if self.quantization.by_block and not self.curvature:
            yield "by_block measures curvature along the steps; give curvature, or leave it out"
        if self.trained and getattr(self.text, "train", self) is None:
            yield f"run {self.trained[0].name} is trained; give the text a training file"
        for run in self.trained:
            yield from self._problems_of(run)
        yield from unknown_parents(self.runs)
        yield from unknown_ingredients(self.runs)
        yield from self._problems_of_slices()
        yield from self._problems_of_planes()

    def _problems_of_slices(self) -> Iterator[str]:
        # A control has no slice, so one checkpoint is enough for it.
        compared = [run for run in self.runs if run.name not in self.controls]
        for run in compared if self.quantization.by_block else ():
            if self.before(run, last_model(run)) is None:
                action = "save more" if isinstance(run, RunConfig) else "choose another stage"
                yield (
                    f"{run.name} has no checkpoint before its last one, and a slice goes through"
                    f" both; {action}, or leave quantization.by_block out"
                )

    def _problems_of_planes(self) -> Iterator[str]:
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            yield f"two planes share a name among {', '.join(names)}"
        for plane in self.planes:
            try:
                points = list(self.points_of(plane).values())
            except ValueError as error:
                yield f"plane {plane.name}: {error}; correct planes, or leave them out: planes=[]"
                continue
            if len(set(points)) != len(points):
                yield f"plane {plane.name} goes through one model twice; give three"
        if self.pca and not self.branched_runs:
            yield (
                f"no run with {FEWEST_OF_PLANE} checkpoints has others that branch from it, whose"
                " plane pca is of; save more, or leave pca out"
            )

    def _problems_of(self, run: RunConfig) -> Iterator[str]:
        name = run.name
        averages = [
            *(soup.name for soup in self.soups if soup.is_of(run)),
            *(average.name for average in run.averages),
        ]
        if len(set(averages)) != len(averages):
            yield f"two averages of run {name} share a name among {', '.join(averages)}"
        measured = set(self.averaged_steps).intersection(run.save_steps) if run.averages else set()
        for step in sorted(measured):
            if not run.saving.writes_averages(step):
                yield (
                    f"averages are to be measured at step {step}, {name} writes none there; add it"
                    " to saving.average_steps"
                )
        lengths = {
            f"{name}.sequence_length": each.sequence_length
            for name, each in self.measured_by.items()
        }
        yield from misfits(run, self.measured_specs, lengths)
        if run.branch_from:
            parent, step = self.parent_of(run), run.branch_from.step
            if parent.branch_from:
                yield f"{name} branches from {parent.name}, a branch itself; branch from its parent"
            # A branch needs a checkpoint, and one with the state of the optimizer.
            if step not in parent.save_steps:
                yield f"{name} branches at step {step}, {parent.name} saves none there"
            elif not parent.saving.keeps_state(step):
                yield (
                    f"{name} branches at step {step}, of which {parent.name} keeps weights only;"
                    " add it to saving.full_steps"
                )
            if run.branch_from.fingerprint != fingerprint(parent):
                yield f"{name} names another fingerprint than that of its parent {parent.name}"

    @cached_property
    def measured_specs(self) -> tuple[str, ...]:
        """Every spec that anything of the study is quantized with."""
        of_tasks = self.tasks.specs if self.tasks else ()
        return (*self.quantization.at_the_end, *self.quantization.by_block, *of_tasks)

    @cached_property
    def measured_by(self) -> dict[str, AnySettings]:
        """The settings of all that the study measures, by its field."""
        by_block = bool(self.quantization.by_block)
        along = ("step",) if by_block else ()
        planes = ("slice",) if by_block or self.planes else ()
        parts = (
            "quantization",
            "curvature",
            *along,
            *planes,
            "pca",
            "critical",
            "outliers",
            "tasks",
        )
        return {name: settings for name in parts if (settings := getattr(self, name))}

    def parent_of(self, run: RunConfig) -> RunConfig:
        """Return the run of this study that `run` branches from; ValueError without one."""
        assert run.branch_from
        parent_path = run.branch_from.run
        for parent in self.trained:
            if parent_path == f"../{parent.name}":
                return parent
        raise ValueError(f"{run.name} branches from {parent_path}, which is not a run of the study")

    def part(self, experiment: Experiment) -> "Study":
        """Return the study of an experiment's runs, with its captions.

        It has the axes, labels and controls of these runs.
        """
        runs = runs_with_origins(self.runs, experiment.runs)
        names = {run.name for run in runs}
        trained = [run for run in runs if isinstance(run, RunConfig)]
        saved = {step for run in trained if run.averages for step in run.save_steps}
        changes: dict[str, Any] = {
            "runs": runs,
            "experiments": (),
            "labels": {name: text for name, text in self.labels.items() if name in names},
            "captions": self.captions | experiment.captions,
            "averaged_steps": tuple(step for step in self.averaged_steps if step in saved),
            "soups": tuple(soup for soup in self.soups if any(map(soup.is_of, trained))),
            "planes": tuple(
                plane
                for plane in self.planes
                if all(point.run in names for point in self.points_of(plane).values())
            ),
            "pca": None,
        }
        part = Study.model_validate(dict(self) | changes)
        if self.pca and part.branched_runs:
            return Study.model_validate(dict(part) | {"pca": self.pca})
        return part

    def models_of(self, run: AnyRun) -> list[MeasuredModel]:
        """Return the measured models of the run by rising step, averages after weights."""
        if isinstance(run, ReleasedRun):
            return released_models(run)
        models, averages = [], self._is_among(self.averaged, run)
        for step in run.save_steps:
            models.append(MeasuredModel(step))
            if not averages:
                continue
            if step in self.averaged_steps:
                models += [MeasuredModel(step, average.name) for average in run.averages]
            models += [
                MeasuredModel(
                    step,
                    soup.name,
                    tuple(str(hf_directory(run.name, MeasuredModel(each))) for each in soup.steps),
                    soup.decay,
                )
                for soup in self.soups
                if soup.steps[-1] == step and soup.is_of(run)
            ]
        return models

    def points_of(self, plane: NamedPlane) -> dict[str, StudyPoint]:
        """Return the models that the points of a plane mean, by name; ValueError for no model."""
        models = {run.name: self.models_of(run) for run in self.runs}
        return {name: point_of(text, models) for name, text in plane.points.items()}

    @cached_property
    def resolved_planes(self) -> tuple[ResolvedPlane, ...]:
        """The named planes, with the models that their points mean."""
        return tuple(ResolvedPlane(plane.name, self.points_of(plane)) for plane in self.planes)

    @cached_property
    def branched_runs(self) -> tuple[BranchedRun, ...]:
        """The weights of each run that others branch from, and those of these others.

        Runs have three checkpoints or more. The first run of a group stands for its seeds, where
        these have no details.
        """
        branched = []
        origins = [(run, origin) for run in self.runs if (origin := self.origin(run))]
        for run in self.runs:
            starts = {
                other.name: weights
                for other, (parent, weights) in origins
                if parent.name == run.name
            }
            models = self._weights_of(run)
            if not starts or len(models) < FEWEST_OF_PLANE or not self._has_details(run):
                continue
            branches = {
                other.name: self._weights_of(other) for other, _ in origins if other.name in starts
            }
            branched.append(BranchedRun(run.name, models, branches, starts))
        return tuple(branched)

    def _weights_of(self, run: AnyRun) -> tuple[MeasuredModel, ...]:
        return tuple(model for model in self.models_of(run) if model.average is None)

    def origin(self, run: AnyRun) -> tuple[AnyRun, MeasuredModel] | None:
        """Return the run or stage that a branch or a stage starts from, and its weights there."""
        if isinstance(run, ReleasedRun):
            stage = stage_before(self.runs, run)
            return (stage, last_model(stage)) if stage else None
        if not run.branch_from:
            return None
        return self.parent_of(run), MeasuredModel(run.branch_from.step)

    def _has_details(self, run: AnyRun) -> bool:
        """Return whether more is measured of a run than what every seed has."""
        return self._is_among(self.detailed, run)

    def _is_among(self, seeds: Seeds, run: AnyRun) -> bool:
        return seeds == "every seed" or run == self.group_of(run).runs[0]

    def control_of(self, run: AnyRun) -> RunConfig | None:
        """Return the run of this study that trains like an annealed one, to its end, without."""
        return control_among(self.trained, run)

    def unperturbed_of(self, run: AnyRun) -> RunConfig | None:
        """Return the run of this study that trains like a perturbed one, to its end, without."""
        return unperturbed_among(self.trained, run)

    @cached_property
    def controls(self) -> frozenset[str]:
        """The names of the runs that are the controls of others."""
        return frozenset(control.name for run in self.runs if (control := self.control_of(run)))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The quantities in which the runs differ, in the order in which labels have them."""
        return axes_of(self.runs, self.controls)

    @cached_property
    def varied(self) -> Varied | None:
        """The axis that figures of final errors are drawn against; None where none has numbers."""
        return varied_of(self.axes, self.controls)

    @property
    def heading(self) -> str:
        """The names of the axes, for legends: 'peak learning rate and weight decay'."""
        *first, last = (axis.name for axis in self.axes)
        return f"{', '.join(first)} and {last}" if first else last

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The runs that are the same but for their seed, with their values on the axes.

        A group is named after its first run where another has the same values.
        """
        axes, controls, replicates = self.axes, self.controls, replicates_of(self.runs)
        texts = [text_of(axes, first.name, controls) for first, *_ in replicates]
        groups = []
        for text, runs in zip(texts, replicates, strict=True):
            name = runs[0].name
            # Two groups may have equal values where they differ in what makes no axis.
            label = text if texts.count(text) == 1 else name
            groups.append(Group(self.labels.get(name, label), tuple(runs)))
        return tuple(groups)

    def group_of(self, run: AnyRun) -> Group:
        """Return the group of a run."""
        return next(group for group in self.groups if run in group.runs)

    def label_of(self, run: AnyRun) -> str:
        """Return the label of the run's group, for legends, with its seed where it has several."""
        group = self.group_of(run)
        seed = f", seed {run.seed}" if isinstance(run, RunConfig) and len(group.runs) > 1 else ""
        return self.labels.get(run.name, group.label + seed)

    @property
    def measurements(self) -> tuple["Measurement", ...]:
        """The kinds of measurement that the study makes, with their settings."""
        chosen = ((kind, settings_of(self)) for kind, settings_of in KINDS)
        return tuple(Measurement(kind, settings) for kind, settings in chosen if settings)

    def measured(self, run: AnyRun) -> dict[MeasuredModel, tuple["Measurement", ...]]:
        """Return the kinds of measurement that are made of each measured model of a run.

        A control has none of those that only the end of a run has.
        """
        # The first run of a group stands for its seeds.
        has_details = self._has_details(run)
        is_control = run.name in self.controls
        kinds = [
            measurement
            for measurement in self.measurements
            if (has_details or measurement.kind.every_seed)
            and not (is_control and measurement.kind.at_the_end(measurement.settings))
        ]
        last, moves = last_model(run), self.moves(run)
        return {
            model: tuple(
                each
                for each in kinds
                if each.kind.measures(each.settings, model, last, moved=model in moves)
            )
            for model in self.models_of(run)
        }

    def moves(self, run: AnyRun) -> dict[MeasuredModel, tuple[AnyRun, MeasuredModel]]:
        """Return the weights of the checkpoint before each one, with the run that has them.

        A branch or stage has that of its first one in its parent. The first checkpoint of a
        training has none, and averages have none.
        """
        if isinstance(run, ReleasedRun) and run.average_of:
            return {}
        weights = self._weights_of(run)
        earlier = [self.origin(run), *((run, each) for each in weights)]
        return {model: before for model, before in zip(weights, earlier, strict=False) if before}

    def before(self, run: AnyRun, model: MeasuredModel) -> tuple[AnyRun, MeasuredModel] | None:
        """Return the weights of the checkpoint before one; None where `moves` has none."""
        return self.moves(run).get(model)


class Measurement(NamedTuple):
    """A kind of measurement with the settings that a study has for it."""

    kind: Kind[Any]
    settings: Any


def _planes(study: Study) -> Planes | None:
    planes = study.resolved_planes
    return Planes(planes, study.slice, study.quantization) if planes else None


def _branched_runs(study: Study) -> BranchedRuns | None:
    return BranchedRuns(study.branched_runs, study.pca) if study.pca else None


def _along[Settings](study: Study, settings: Settings) -> Along[Settings] | None:
    specs = study.quantization.by_block
    return Along(specs, settings) if specs else None


def _directions(study: Study) -> Along[LineSettings] | None:
    return Along(study.quantization.by_block, study.critical) if study.critical else None


# Every kind of measurement, with its settings in a study that makes it. The order is that in which
# the steps of a run start, long ones first, so that the last run leaves no core idle.
KINDS: tuple[tuple[Kind[Any], Callable[[Study], Any]], ...] = (
    (QUANTIZE, lambda study: study.quantization),
    (BLOCKS, lambda study: study.quantization if study.quantization.by_block else None),
    (METHODS_AT_THE_END, lambda study: study.quantization),
    (CURVATURE, lambda study: study.curvature),
    (STEP, lambda study: _along(study, study.step)),
    (SLICE, lambda study: _along(study, study.slice)),
    (PLANE, _planes),
    (PCA, _branched_runs),
    (CRITICAL, _directions),
    (OUTLIERS, lambda study: study.outliers),
    (TASKS, lambda study: study.tasks),
)


def save_study(directory: Path, study: Study) -> None:
    """Write study.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_sealed(directory / "study.json", study.model_dump(mode="json"))


def load_study(directory: Path) -> Study:
    """Return the study of a directory; UserError without one, or for a changed or older one."""
    path, again = directory / "study.json", "run the recipe again, which writes it anew"
    try:
        return as_model(Study, read_sealed(path, again), path)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; start the study with 'python -m study run NAME --root ROOT'"
        ) from None
    except UserError as error:
        raise UserError(f"{str(error).partition(';')[0]}; {again}") from None
