"""The loss on planes through models of any runs, and on the plane of a whole trajectory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from curvature.settings import PlaneSettings, SliceSettings
from study.measurements.kind import Kind, Subject, Subjects, options
from study.measurements.quantization import QuantizationSettings, dense_step
from study.paths import MeasuredModel, curvature_result
from study.planes import StudyPoint
from study.step import Step


class ResolvedPlane(NamedTuple):
    """A named plane of a study, with the models that its points mean by their names."""

    name: str
    points: Mapping[str, StudyPoint]

    @property
    def result(self) -> str:
        """The path of its result, beside the first model."""
        first = next(iter(self.points.values()))
        return curvature_result(first.run, first.model, f"plane-{self.name}")


class Planes(NamedTuple):
    """The named planes of a study, and what they are measured and quantized by."""

    planes: tuple[ResolvedPlane, ...]
    settings: PlaneSettings
    quantization: QuantizationSettings


class BranchedRun(NamedTuple):
    """A run with the runs that branch from it.

    Attributes:
        run: its name.
        models: its checkpoints, of which the components are.
        branches: the checkpoints of each branch, by run.
        starts: the checkpoint of the run that each branch leaves, by the branch's name.
    """

    run: str
    models: tuple[MeasuredModel, ...]
    branches: Mapping[str, tuple[MeasuredModel, ...]]
    starts: Mapping[str, MeasuredModel]

    @property
    def result(self) -> str:
        """The path of its result, beside the last checkpoint."""
        return curvature_result(self.run, self.models[-1], "pca")

    @property
    def lines(self) -> Mapping[str, Sequence[tuple[str, MeasuredModel]]]:
        """The checkpoints along the run and along each branch from its start, each of its run."""
        lines = {self.run: [(self.run, model) for model in self.models]}
        for branch, models in self.branches.items():
            start = (self.run, self.starts[branch])
            lines[branch] = [start, *((branch, model) for model in models)]
        return lines


class BranchedRuns(NamedTuple):
    """The runs of a study that have branches, and the settings of their planes."""

    runs: tuple[BranchedRun, ...]
    settings: PlaneSettings


def _command(
    subject: Subject, measurement: str, words: list[str], settings: PlaneSettings, result: str
) -> tuple[str, ...]:
    text = ("--data", subject.texts["held_out"].prefix)
    chosen = options(SliceSettings, settings, device="{device}")
    out = ("--out", f"{{study}}/{Path(result).parent}")
    return ("{launch}", "-m", "curvature", measurement, *words, *text, *chosen, *out)


def _plane_steps(planes: Planes, subjects: Subjects) -> list[Step]:
    quantizing: dict[StudyPoint, Step] = {}  # one serves all planes through its weights
    steps: list[Step] = []
    for plane in planes.planes:
        words, making = [], []
        for name, point in plane.points.items():
            subject = subjects[point.run, point.model]
            place, maker = subject.hf, subject.making
            if point.spec:
                if point not in quantizing:
                    made = dense_step("plane", point.spec, planes.quantization, subject)
                    quantizing[point] = made
                    steps.append(made)
                maker = quantizing[point]
                place = f"{{study}}/{Path(maker.outputs[0]).parent}"
            words += [place, "--name", name]
            making.append(maker)

        first = next(iter(plane.points.values()))
        subject = subjects[first.run, first.model]
        steps.append(
            subject.step(
                "plane",
                f"plane-{plane.name}",
                _command(subject, "slice", words, planes.settings, plane.result),
                (plane.result,),
                uses=("held_out",),
                after=tuple(step for step in making if step is not subject.making),
                expected_seconds=2.0,
            )
        )
    return steps


def _pca_steps(branched: BranchedRuns, subjects: Subjects) -> list[Step]:
    steps = []
    for trajectory in branched.runs:
        fitted = [subjects[trajectory.run, model] for model in trajectory.models]
        projected = [
            subjects[run, model] for run, models in trajectory.branches.items() for model in models
        ]
        words = [subject.hf for subject in fitted]
        words += [word for subject in projected for word in ("--project", subject.hf)]
        last = fitted[-1]
        steps.append(
            last.step(
                "pca",
                f"pca-{trajectory.run}",
                _command(last, "pca", words, branched.settings, trajectory.result),
                (trajectory.result,),
                uses=("held_out",),
                after=tuple(each.making for each in (*fitted[:-1], *projected)),
                expected_seconds=2.0,
            )
        )
    return steps


PLANE = Kind[Planes]("plane", "several", together=_plane_steps, shares_work=True)
PCA = Kind[BranchedRuns]("pca", "several", together=_pca_steps, shares_work=True)
