"""The accuracy of quantized models on downstream tasks, at the last checkpoint of each run."""

from collections.abc import Mapping
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from base.frozen import Frozen, field_of
from ckpt_tools.hf.measured import Tasks
from quant_eval.settings import TaskSettings
from quant_eval.tasks.table import PAPER_TASKS
from study.measurements.kind import Kind, Result, Subject, bounded
from study.measurements.quantization import (
    QuantizationSettings,
    calibration_options,
    check_specs,
    computing_options,
    is_calibrated,
)
from study.paths import result
from study.pipeline.step import Step

FIGURES = ("accuracy", "accuracy_quantized", "degradation")


class TasksSettings(Frozen):
    """Downstream tasks of the last checkpoint of each run, full and quantized.

    By default the twelve of arXiv 2510.06213 (section 3.2), with five examples each.
    """

    specs: tuple[str, ...] = Field(min_length=1)
    tasks: tuple[str, ...] = Field(default=tuple(PAPER_TASKS), min_length=1)
    shots: int = field_of(TaskSettings, "shots")
    documents: int | None = field_of(TaskSettings, "limit")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_specs(self.specs)
        unknown = [task for task in self.tasks if task not in PAPER_TASKS]
        if unknown:
            raise ValueError(f"no task '{unknown[0]}'; take some of {', '.join(PAPER_TASKS)}")
        return self


class Accuracies(NamedTuple):
    """Tasks, and the quantization that they are measured of."""

    tasks: TasksSettings
    quantization: QuantizationSettings


def _steps(settings: Accuracies, subject: Subject, _: Mapping[str, list[Step]]) -> list[Step]:
    tasks, quantization = settings
    options = (
        *calibration_options(tasks.specs, quantization, subject),
        *("--tasks", ",".join(tasks.tasks), "--shots", str(tasks.shots)),
        *(("--limit", str(tasks.documents)) if tasks.documents else ()),
        *computing_options(quantization),
    )
    return [
        subject.step(
            "tasks",
            f"tasks-{subject.run}-{spec}",
            ("{launch}", "-m", "quant_eval", "tasks"),
            (result(subject.run, subject.model, "tasks", spec),),
            uses=("calibration",) if is_calibrated((spec,)) else (),
            models=(subject.hf,),
            specs=("--spec", spec),
            tail=options,
            expected_seconds=600.0,
        )
        for spec in tasks.specs
    ]


def _tabled(settings: Accuracies) -> list[Result]:
    results = []
    for spec in settings.tasks.specs:
        columns = []
        for figure in FIGURES:
            columns += bounded(f"tasks/{spec}/{figure}", figure, "mean")
        for task in settings.tasks.tasks:
            for figure in FIGURES:
                columns += bounded(f"tasks/{spec}/{task}/{figure}", figure, "tasks", task)
        results.append(Result("tasks", spec, Tasks, columns))
    return results


TASKS = Kind[Accuracies]("tasks", "last", _steps, _tabled, online=True, shares_work=True)
