"""What decides the downstream figures besides the model and the spec."""

from pathlib import Path

from pydantic import Field

from quant_eval.settings import ComputeSettings
from train.frozen import Frozen


class TaskSettings(Frozen):
    """How both models are asked, and how sure the answers are."""

    tasks: tuple[str, ...] = Field(min_length=1, description="names in the table, in its order")
    num_fewshot: int = Field(ge=0, description="examples before each question")
    limit: int | None = Field(ge=1, description="first items of each task, of mmlu of each subject; None: all")
    task_files: Path | None = Field(description="directory of local documents; None: the Hugging Face hub")
    seed: int = Field(ge=0, lt=2**63, description="of the choice of examples and of the bootstrap")
    bootstrap_samples: int = Field(ge=100)
    level: float = Field(gt=0, lt=1, description="coverage of the intervals")
    compute: ComputeSettings
