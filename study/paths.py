"""The places of a study's files, below its directory."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.hf.directory import DOWNLOAD_JSON, LINEAGE_JSON, RESULT_JSON
from study.axes import AnyRun
from study.released import ReleasedRevision, ReleasedRun, lawa_name
from train.run.directory import RunDirectory, step_name
from train.run.optimization import Shape

MLFLOW_STORE = "mlflow.db"  # beside all studies of a root
REPORT = "report.html"  # in a study's directory
MIRROR_JSON = "mlflow.json"


class MeasuredModel(NamedTuple):
    """A measured model of a run: the weights after update `step`, or an average up to it.

    The step is 0 where the source of a released model states none; then the run has one model.
    """

    step: int
    average: str | None = None  # its name: lawa5x500 of one kept in training, lawa5, or a soup's
    # HF directories below the study that it is made of; empty: training kept it
    members: tuple[str, ...] = ()
    decay: Shape | None = None  # of the learning rate, emulated by their mean
    revision: str | None = None  # of a released model


def checkpoint_directory(run: str, model: MeasuredModel) -> Path:
    """Return where training leaves the model; it leaves no soups."""
    directory = RunDirectory(Path(run))
    if model.average:
        return directory.average_checkpoint(model.average, model.step)
    return directory.checkpoint(model.step)


@cache  # asked several times for each of thousands of measurements
def hf_directory(run: str, model: MeasuredModel) -> Path:
    """Return where the model is as it is measured."""
    directory = RunDirectory(Path(run))
    if model.revision:
        return directory.hf / model.revision
    if model.average:
        return directory.hf / directory.average_name(model.average, model.step)
    return directory.hf / step_name(model.step)


def model_record(run: str, model: MeasuredModel) -> str:
    """Return the file, written last, that makes the model complete."""
    return str(hf_directory(run, model) / (DOWNLOAD_JSON if model.revision else LINEAGE_JSON))


def released_model(revision: ReleasedRevision) -> MeasuredModel:
    """Return a released model as it is measured."""
    return MeasuredModel(revision.step or 0, revision=revision.name)


def released_models(run: ReleasedRun) -> list[MeasuredModel]:
    """Return the measured models of a stage by rising step, averages after weights."""

    def directory(run_name: str, revision: str) -> str:
        return f"{RunDirectory(Path(run_name)).hf}/{revision}"

    measured = [revision.name for revision in run.revisions]
    models = []
    for revision in run.fetched:
        model = released_model(revision)
        if revision.name in measured:
            models.append(model)
            before = measured[: measured.index(revision.name) + 1]
            models += [
                MeasuredModel(
                    model.step,
                    lawa_name(window),
                    tuple(directory(run.name, name) for name in before[-window:]),
                )
                for window in run.windows
                if len(before) >= window
            ]
        models += [
            MeasuredModel(
                model.step,
                soup.name,
                tuple(directory(*member.split("/")) for member in soup.members),
            )
            for soup in run.soups
            if soup.members[-1] == f"{run.name}/{revision.name}"
        ]
    return models


def ingredients(run: AnyRun) -> list[MeasuredModel]:
    """Return what is fetched for soups of a stage alone, and is not measured."""
    return (
        [released_model(each) for each in run.ingredients] if isinstance(run, ReleasedRun) else []
    )


def last_model(run: AnyRun) -> MeasuredModel:
    """Return the weights at the end of the run."""
    if isinstance(run, ReleasedRun):
        return released_model(run.revisions[-1])
    return MeasuredModel(run.total_steps)


def result(run: str, model: MeasuredModel, folder: str, spec: str) -> str:
    """Return the result of one measurement of a model: RUN/hf/MODEL/FOLDER/SPEC/result.json."""
    # As text: joining paths is slow, and a large study has tens of thousands of results.
    return f"{hf_directory(run, model)}/{folder}/{spec}/{RESULT_JSON}"


def quantization_result(run: str, model: MeasuredModel, spec: str) -> str:
    """Return the result of one quantization."""
    return result(run, model, "quant", spec)


def curvature_result(run: str, model: MeasuredModel, spec: str = "hutchinson") -> str:
    """Return the result of a measurement of curvature: by default traces and eigenvalue."""
    return result(run, model, "curvature", spec)


def blocks_result(run: AnyRun, spec: str) -> str:
    """Return the result of the last checkpoint block by block.

    Not below quant/, where the same spec has its result as at every other checkpoint.
    """
    return result(run.name, last_model(run), "blocks", spec)


def step_result(run: AnyRun, spec: str) -> str:
    """Return the result of the quantization step of the last checkpoint."""
    return curvature_result(run.name, last_model(run), f"step-{spec}")


def slice_result(run: AnyRun, spec: str) -> str:
    """Return the result of the slice through the last two checkpoints and the quantized one."""
    return curvature_result(run.name, last_model(run), f"slice-{spec}")
