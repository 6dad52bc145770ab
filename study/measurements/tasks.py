"""The accuracy of quantized models on downstream tasks, at the last checkpoint of each run."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from base.frozen import Frozen
from ckpt_tools.hf.measured import Accuracy, Tasks
from ckpt_tools.hf.results import read_result
from quant_eval.tasks.table import PAPER_TASKS
from study.measurements.kind import (
    Kind,
    Reader,
    Subject,
    Type,
    Values,
)
from study.measurements.quantization import QuantizationSettings, check_specs
from study.paths import MeasuredModel, result
from study.pipeline.step import Step, python

FIGURES = ("accuracy", "accuracy_quantized", "degradation")
BOUNDS = ("", "_low", "_high")


class TasksSettings(Frozen):
    """Downstream tasks of the last checkpoint of each run, full and quantized.

    By default the twelve of arXiv 2510.06213 (section 3.2), with five examples each.
    """

    specs: tuple[str, ...] = Field(min_length=1)
    tasks: tuple[str, ...] = Field(default=tuple(PAPER_TASKS), min_length=1)
    shots: int = Field(default=5, ge=0, description="examples before each question")
    documents: int | None = Field(
        default=None,
        ge=1,
        description="first ones of each task, of mmlu of each subject; None: all",
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
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
    options: tuple[str, ...] = ("--calibration", subject.texts["calibration"].prefix)
    options += ("--calibration-sequences", str(quantization.calibration_sequences))
    options += ("--tasks", ",".join(tasks.tasks), "--shots", str(tasks.shots))
    options += ("--limit", str(tasks.documents)) if tasks.documents else ()
    options += ("--dtype", quantization.dtype, "--device", "{device}")
    return [
        subject.step(
            "tasks",
            f"tasks-{subject.run}-{spec}",
            python("quant_eval", "tasks"),
            (result(subject.run, subject.model, "tasks", spec),),
            uses=("calibration",),
            models=(subject.hf,),
            specs=("--spec", spec),
            tail=options,
            expected_seconds=600.0,
        )
        for spec in tasks.specs
    ]


def _columns(settings: Accuracies) -> dict[str, Type]:
    columns: dict[str, Type] = {}
    for spec in settings.tasks.specs:
        for place in ("", *(f"{task}/" for task in settings.tasks.tasks)):
            columns |= {
                f"tasks/{spec}/{place}{figure}{bound}": "number"
                for figure in FIGURES
                for bound in BOUNDS
            }
    return columns


def _values(path: Path, spec: str) -> Values:
    measured, values = read_result(path, Tasks).measured, Values()
    for place, accuracy in {"": measured.mean or Accuracy(), **measured.tasks}.items():
        for figure in FIGURES:
            column = f"tasks/{spec}/{place}{'/' * bool(place)}{figure}"
            low, high = accuracy.intervals.get(figure) or (None, None)
            values |= {column: getattr(accuracy, figure)}
            values |= {f"{column}_low": low, f"{column}_high": high}
    return values


def _results(settings: Accuracies, run: str, model: MeasuredModel) -> dict[str, Reader]:
    return {
        result(run, model, "tasks", spec): partial(_values, spec=spec)
        for spec in settings.tasks.specs
    }


TASKS = Kind[Accuracies]("tasks", "last", _steps, _results, _columns, online=True)
