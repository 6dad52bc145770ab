"""The one reader of result.json, whichever measurement wrote it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from pydantic import Field, ValidationError

from base.errors import UserError
from base.reading import read_sealed
from ckpt_tools.hf.directory import RESULT_JSON
from ckpt_tools.hf.measured import (
    Critical,
    Curvature,
    MeasuredStep,
    Outliers,
    Quantization,
    Read,
    Slice,
    Tasks,
    TrajectoryPlane,
)


class ResultModel(Read):
    """The model that was measured."""

    path: str = ""
    weights_digests: dict[str, str] = Field(default={})


class Evaluation(Read):
    """The text of losses, how it was cut and begun, and the type of the logits."""

    sha256: str | None = None
    sequence_length: int | None = None
    documents: str | None = None
    bos_token_ids: list[int] | None = None  # before each text; a rule alone does not say
    logits: str | None = None


class Sequences(Read):
    """The text of a measurement of curvature."""

    bin_sha256: str | None = None


class Spec(Read):
    """The settings that results of one or another kind are compared by."""

    name: str = ""
    method: str | None = None
    dtype: str | None = None
    evaluation: Evaluation | None = None
    data: Sequences | None = None


class Result[Kind: Read](Read):
    """A result.json; `measured` is of the class of its kind."""

    path: Path
    model: ResultModel = ResultModel()
    spec: Spec = Spec()
    settings: dict[str, Any] = Field(default={})
    measured: Kind
    environment: dict[str, Any] = Field(default={})


NAMES: dict[type[Read], str] = {
    Quantization: "quantization ('python -m quant_eval run')",
    Tasks: "downstream tasks ('python -m quant_eval tasks')",
    Outliers: "outlier statistics ('python -m quant_eval outliers')",
    Curvature: "traces or eigenvalues ('python -m curvature')",
    MeasuredStep: "a quantization step ('python -m curvature step')",
    Critical: "losses along directions ('python -m curvature critical')",
    Slice: "a slice ('python -m curvature slice')",
    TrajectoryPlane: "the plane of a trajectory ('python -m curvature pca')",
}
REMEASURE = (
    "run the study again, or measure again with 'python -m quant_eval' or 'python -m curvature'"
)
# A setting that only specs of this kind have; the first that a spec has decides.
KIND_OF_SETTING: dict[str, type[Read]] = {
    "tasks": Tasks,
    "evaluation": Quantization,
    "outliers": Outliers,
    "plane": Slice,
    "trajectory": TrajectoryPlane,
    "quantized": MeasuredStep,
    "directions": Critical,
    "data": Curvature,
}


@overload
def read_result(path: Path) -> Result[Any]: ...


@overload
def read_result[Kind: Read](path: Path, kind: type[Kind]) -> Result[Kind]: ...


def read_result(path: Path, kind: type[Any] | None = None) -> Result[Any]:
    """Return the result of a result.json or its directory.

    Without `kind` it is of whichever the file holds.

    Raises:
        UserError: the file does not exist, was changed after it was written, or is of another kind.
    """
    path = path / RESULT_JSON if path.is_dir() else path
    content = read_content(path)

    # Its kind follows from its settings; a spec without any of them may be of any kind.
    settings = content["spec"]
    kinds = [of_setting for key, of_setting in KIND_OF_SETTING.items() if key in settings]
    file_kind = kinds[0] if kinds else kind
    if file_kind is None:
        raise UserError(f"{path} is of no known kind of measurement; {REMEASURE}")
    if kind not in (None, file_kind):
        raise UserError(f"{path} is a result of {NAMES[file_kind]}; give one of {NAMES[kind]}")

    try:
        result: Result[Any] = Result[file_kind].model_validate(  # type: ignore[valid-type]
            content | {"path": path, "settings": settings}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{path} is damaged ('{key}': {problem['msg']}); {REMEASURE}") from None
    return result


def read_content(path: Path) -> dict[str, Any]:
    """Return the whole content of a result.json, with its spec, if empty, and `measured`."""
    try:
        content = read_sealed(path, REMEASURE)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; measure it, or run the study again, which does"
        ) from None
    settings = content.get("spec", {})
    if not isinstance(settings, dict) or "measured" not in content:
        raise UserError(f"{path} is not a result of a measurement; give one, or {REMEASURE}")
    return {**content, "spec": settings}


SHOWN_PARTS = 3  # of a model's path: run, hf, checkpoint


def labels(results: Sequence[Result[Any]]) -> list[str]:
    """Return the end of each model's path, as short as still distinguishes the models.

    Results of one model and one spec differ by their own paths.
    """
    ends = _tails([Path(result.model.path) for result in results])
    keys = [(name, result.spec.name) for name, result in zip(ends, results, strict=True)]
    if len(set(keys)) == len(keys):
        return ends
    return _tails([result.path.absolute().parent for result in results])


def _tails(paths: Sequence[Path]) -> list[str]:
    """Return the last three parts of each path, or as many as are needed to make them differ."""
    longest = max(len(path.parts) for path in paths)
    for count in range(SHOWN_PARTS, longest + 1):
        tails = ["/".join(path.parts[-count:]) for path in paths]
        # Results of one model share its path, so no length tells those apart.
        if len(set(tails)) == len(set(paths)):
            return tails
    return [str(path) for path in paths]
