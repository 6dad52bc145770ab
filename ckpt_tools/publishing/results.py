"""What was measured of an HF directory: the result.json files below its quant/ and curvature/, read and checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ckpt_tools.hf_directory import RESULT_JSON, Measurement
from train.command import UserError, explain_validation

NOT_COMPARED = {"prefix", "batch_size"}  # where text lies, and what moves figures by rounding only


class _Result(BaseModel):
    model: dict[str, Any]
    spec: dict[str, Any]
    measured: dict[str, Any]


class Method(BaseModel):
    """What kind of interval every figure of a quantization has."""

    level: float
    method: str


class Intervals(BaseModel):
    """[low, high] of the figures of a quantization."""

    cross_entropy: tuple[float, float]
    cross_entropy_quantized: tuple[float, float]
    relative_error: tuple[float, float]
    kl_divergence: tuple[float, float]


class Quantization(BaseModel):
    """What quantization costs; losses and divergence in nats per token."""

    cross_entropy: float
    cross_entropy_quantized: float
    relative_error: float
    kl_divergence: float
    tokens: int
    documents: int
    intervals: Intervals
    interval: Method


class Trace(BaseModel):
    """Of the Hessian of the loss, in nats per token per squared parameter unit."""

    mean: float
    standard_error: float
    probes: int


class LambdaMax(BaseModel):
    """The Hessian's largest eigenvalue, in nats per token per squared parameter unit, and how far Lanczos came."""

    value: float
    residual: float | None
    converged: bool


class Curvature(BaseModel):
    """Curvature of the loss, which is in nats per token."""

    loss: float
    trace: Trace
    lambda_max: LambdaMax | None = None  # not asked for


@dataclass(frozen=True)
class Result:
    """One result.json.

    Attributes:
        path: of the file.
        measurement: quant or curvature.
        name: of its directory, which is the spec's unless it was given with --out.
        spec: the settings that decide the figures.
        measured: the figures.
    """

    path: Path
    measurement: Measurement
    name: str
    spec: dict[str, Any]
    measured: Quantization | Curvature


def read_results(hf_dir: Path, weights_sha256: dict[str, str]) -> list[Result]:
    """Every result of an HF directory, by measurement and name.

    Raises:
        UserError: a file is no result, or it was measured of other weights than those, given by file.
    """
    results = []
    for measurement in get_args(Measurement):
        for path in sorted((hf_dir / measurement).glob(f"*/{RESULT_JSON}")):
            try:
                result = _Result.model_validate(json.loads(path.read_text()))
                kind = Quantization if measurement == "quant" else Curvature
                measured = kind.model_validate(result.measured)
            except ValidationError as error:
                raise explain_validation(str(path), error) from None
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{path} is not valid JSON ({error}); measure again") from None
            if result.model.get("weights_sha256") != weights_sha256:
                raise UserError(f"{path} was measured of other weights than those of {hf_dir}; measure again")
            results.append(Result(path, measurement, path.parent.name, result.spec, measured))
    return results


def check_comparable(results: list[Result]) -> None:
    """UserError unless the figures of a trajectory may stand side by side.

    Results of one name have one set of settings, and every quantization was evaluated on one text in one precision.
    """
    seen: dict[tuple[str, str], tuple[Any, Result]] = {}
    for result in results:
        settings = _compared(result.spec)
        keys: dict[tuple[str, str], Any] = {(result.measurement, result.name): settings}
        if result.measurement == "quant":
            keys["quant", ""] = {key: settings.get(key) for key in ("evaluation", "dtype")}
        for key, value in keys.items():
            before, first = seen.setdefault(key, (value, result))
            if before != value:
                raise UserError(
                    f"{first.path} and {result.path} were measured on different text or with other settings, their "
                    f"figures do not compare; measure one of them again, or move it out of its HF directory"
                )


def _compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _compared(inner) for key, inner in value.items() if key not in NOT_COMPARED}
    return value
