"""The options of downstream tasks besides the model and the spec."""

from pathlib import Path
from typing import Any

from pydantic import Field

from quant_eval.settings import CalibrationSettings
from quant_eval.tasks.table import choose_tasks


class TaskSettings(CalibrationSettings):
    """All settings of the questions to both models."""

    tasks: str = Field(
        default="paper",
        description="names with commas between; paper: the twelve of arXiv:2510.06213",
    )
    shots: int = Field(default=5, ge=0, description="examples before each question")
    limit: int | None = Field(
        default=None,
        ge=1,
        description="first items of each task, of mmlu of each subject; if not given all",
    )
    task_files: Path | None = Field(
        default=None,
        description=(
            "directory with TASK.jsonl, and TASK.fewshot.jsonl for the examples;"
            " mmlu/SUBJECT.jsonl for mmlu; if not given the Hugging Face hub"
        ),
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, in the order of the table."""
        return choose_tasks(self.tasks)

    def described(self, calibration_sha256: str) -> dict[str, Any]:
        """Return what a result says of them, the tasks' documents aside."""
        return {
            "calibration": {
                "prefix": str(self.calibration),
                "sha256": calibration_sha256,
                "sequences": self.calibration_sequences,
                "sequence_length": self.sequence_length,
                "seed": self.seed,
            },
            "num_fewshot": self.shots,
            "limit": self.limit,
            "seed": self.seed,
        }
