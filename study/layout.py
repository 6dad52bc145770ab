"""Where the files of a study lie, below its directory."""

from pathlib import Path

from ckpt_tools.hf_directory import LINEAGE_JSON, RESULT_JSON, result_directory
from ckpt_tools.released.download_record import DOWNLOAD_JSON
from study.released import ReleasedRun
from study.settings import MeasuredModel
from train.config import RunConfig
from train.run_directory import RunDirectory, step_name

MLFLOW_STORE = "mlflow.db"  # beside all studies of a root
CORPUS = "data/corpus"
CURVATURE_SPEC = "hutchinson"


def checkpoint_directory(run: str, model: MeasuredModel) -> Path:
    """Where training leaves the model; it leaves no soups."""
    directory = RunDirectory(Path(run))
    if model.average:
        return directory.average_checkpoint(model.average, model.step)
    return directory.checkpoint(model.step)


def hf_directory(run: str, model: MeasuredModel) -> Path:
    """Where the model lies as it is measured."""
    directory = RunDirectory(Path(run))
    if model.revision:
        return directory.hf / model.revision
    name = directory.average_name(model.average, model.step) if model.average else step_name(model.step)
    return directory.hf / name


def model_record(run: str, model: MeasuredModel) -> str:
    """The file, written last, that makes the model complete."""
    return str(hf_directory(run, model) / (DOWNLOAD_JSON if model.revision else LINEAGE_JSON))


def last_model(run: RunConfig | ReleasedRun) -> MeasuredModel:
    """The weights at the end of the run."""
    if isinstance(run, ReleasedRun):
        return MeasuredModel(run.total_steps, revision=run.revisions[-1].name)
    return MeasuredModel(run.total_steps)


def quantization_result(run: str, model: MeasuredModel, spec: str) -> str:
    """Result of one quantization."""
    return str(result_directory(hf_directory(run, model), "quant", spec) / RESULT_JSON)


def curvature_result(run: str, model: MeasuredModel, spec: str = CURVATURE_SPEC) -> str:
    """Result of a measurement of curvature: by default traces and eigenvalue."""
    return str(result_directory(hf_directory(run, model), "curvature", spec) / RESULT_JSON)


def blocks_result(run: RunConfig | ReleasedRun, spec: str) -> str:
    """Result of the last checkpoint block by block: RUN/hf/STEP/blocks/SPEC.

    Not below quant/, where the same spec has its result as at every other checkpoint.
    """
    return str(hf_directory(run.name, last_model(run)) / "blocks" / spec / RESULT_JSON)


def step_result(run: RunConfig | ReleasedRun, spec: str) -> str:
    """Result of the quantization step of the last checkpoint."""
    return curvature_result(run.name, last_model(run), f"step-{spec}")


def slice_result(run: RunConfig | ReleasedRun, spec: str) -> str:
    """Result of the slice through the last two checkpoints and the quantized last one."""
    return curvature_result(run.name, last_model(run), f"slice-{spec}")
