"""The accuracy of quantized models on downstream tasks, along training or at its end."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from ckpt_tools.hf.measured import Tasks
from quant_eval.paper_tasks import choose_tasks
from quant_eval.settings import QuestionSettings, TaskSettings, check_calibration
from quant_eval.specs import parse_spec
from study.measurements.kind import SHARE, Column, Kind, Subject, TabledResult, bounded
from study.measurements.quantization import check_specs, is_calibrated, quantizing_options
from study.paths import result
from study.step import Step

ACCURACY = Column("tasks/{spec}/{task}/accuracy", "accuracy", SHARE, "higher")
QUANTIZED = Column("tasks/{spec}/{task}/accuracy_quantized", "quantized accuracy", SHARE, "higher")
DEGRADATION = Column(
    "tasks/{spec}/{task}/degradation", "accuracy lost / (1 - accuracy before)", SHARE, "lower"
)
COLUMNS = (ACCURACY, QUANTIZED, DEGRADATION)  # without a task: the mean of the tasks


class TasksSettings(QuestionSettings):
    """Downstream tasks of models, full and quantized: of the last checkpoint of each run, or all.

    By default the twelve of arXiv 2510.06213 (section 3.2), with five examples each.
    """

    specs: tuple[str, ...] = Field(min_length=1, description="for each model that is asked")
    along: bool = Field(
        default=False,
        description="ask every checkpoint, averages aside; if not, the last of each run",
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_specs(self.specs)
        check_calibration(
            [spec for spec in map(parse_spec, self.specs) if spec.needs_calibration], self
        )
        choose_tasks(self.tasks)
        if self.task_files and not self.task_files.is_absolute():
            raise ValueError(f"task_files {self.task_files} is relative; give an absolute path")
        return self


def _steps(settings: TasksSettings, subject: Subject, _: Mapping[str, list[Step]]) -> list[Step]:
    calibration = subject.texts["calibration"].prefix
    model = f"{subject.run}-{subject.name}" if settings.along else subject.run
    options = quantizing_options(TaskSettings, settings, settings.specs, calibration)
    return [
        subject.step(
            "tasks",
            f"tasks-{model}-{spec}",
            ("{launch}", "-m", "quant_eval", "tasks"),
            (result(subject.run, subject.model, "tasks", spec),),
            uses=("calibration",) if is_calibrated((spec,)) else (),
            models=(subject.hf,),
            specs=("--spec", spec),
            tail=options,
            expected_seconds=600.0,
        )
        for spec in settings.specs
    ]


def _tabled(settings: TasksSettings) -> list[TabledResult]:
    results = []
    for spec in settings.specs:
        readings = []
        for figure in COLUMNS:
            # Columns without a task hold the mean of the tasks.
            readings += bounded(figure, figure.of(spec), "mean")
        for task in settings.names:
            for figure in COLUMNS:
                readings += bounded(figure, figure.of(spec, task), "tasks", task)
        results.append(TabledResult("tasks", spec, Tasks, readings))
    return results


TASKS = Kind[TasksSettings](
    "tasks",
    "last",
    _steps,
    _tabled,
    along=lambda settings: settings.along,
    online=True,
    shares_work=True,
)
