"""Differences of traces between results made on the same microbatches with the same probes, with intervals and tests.

Microbatch and probe move the trace of neighbouring checkpoints alike, so the differences microbatch by microbatch
scatter far less than the traces themselves. They are independent and stand for the text: d = mean(d_m), its standard
error s / sqrt(M), and Student's t with M - 1 degrees of freedom, for M microbatches.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from scipy.special import stdtr

from ckpt_tools.holm import holm
from curvature.trace.hutchinson import estimate_mean
from train.command import UserError

TRACE = "trace"
UNIT = "nats per token per squared parameter unit"
METHOD = (
    "difference of the traces of the same microbatches with the same probes: Student's t over the differences of the "
    "microbatches, two-sided; p-values adjusted over all pairs by Holm (1979), intervals not adjusted"
)
SHOWN_PARTS = 3  # of a model's path: run, hf, checkpoint


class _Model(BaseModel):
    path: str


class _Name(BaseModel):
    name: str


class _Named(BaseModel):
    spec: _Name


class _Data(BaseModel):
    bin_sha256: str


class _Spec(BaseModel):
    data: _Data
    sequence_length: int
    microbatch_sequences: int
    seed: int
    probes_per_microbatch: int
    dtype: str


class _Trace(BaseModel):
    per_microbatch: list[FiniteFloat] = Field(min_length=2)


class _Measured(BaseModel):
    trace: _Trace
    block_traces: dict[str, _Trace]


class Result(BaseModel):
    """What a comparison reads of a result.json."""

    model: _Model
    spec: _Spec
    measured: _Measured

    @property
    def label(self) -> str:
        """The end of the model's path that tells it from others of a study."""
        return "/".join(Path(self.model.path).parts[-SHOWN_PARTS:])

    def values(self, figure: str) -> list[float]:
        """The trace, or that of a block, of every microbatch.

        Raises:
            UserError: the model has no such block.
        """
        blocks = self.measured.block_traces
        if figure != TRACE and figure not in blocks:
            raise UserError(f"{self.label} has no figure '{figure}'; give {TRACE} or one of {', '.join(blocks)}")
        return (self.measured.trace if figure == TRACE else blocks[figure]).per_microbatch


class Difference(NamedTuple):
    """Second minus first, in the unit of the trace.

    Attributes:
        value: mean over the microbatches.
        standard_error: of it.
        low, high: its interval.
        p_value: of no difference; two-sided.
    """

    value: float
    standard_error: float
    low: float
    high: float
    p_value: float


class Comparison(NamedTuple):
    """One pair of a call.

    Attributes:
        first, second: places of the results in the call.
        first_value, second_value: their traces.
        difference: second minus first.
        unpaired_standard_error: of the difference, had the results been made on text and probes of their own.
        p_adjusted: Holm, over the pairs of the call.
        verdict: on the second, by the adjusted p-value.
    """

    first: int
    second: int
    first_value: float
    second_value: float
    difference: Difference
    unpaired_standard_error: float
    p_adjusted: float
    verdict: Literal["higher", "lower", "not told apart"]


def paired_difference(first: Sequence[float], second: Sequence[float], level: float) -> Difference:
    """How far the mean of `second` lies above that of `first`, by Student's t over the differences of the pairs.

    Where all differences are equal the interval has no length and the p-value is 0, or 1 if they are 0.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} values are no pairs, or too few")
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean, error, (low, high) = estimate_mean(differences, level=level)
    statistic = abs(mean) / error if error else math.inf if mean else 0.0
    p_value = 2 * float(stdtr(len(differences) - 1, -statistic))
    return Difference(mean, error, low, high, p_value)


def read_result(content: Any, source: str) -> Result:
    """What a comparison reads of the content of a result.json; `source` names it.

    Raises:
        UserError: it is no result of this version, or of another spec than hutchinson.
    """
    try:
        name = _Named.model_validate(content).spec.name
        if name != "hutchinson":
            raise UserError(
                f"{source} is of '{name}', without a trace of every microbatch; give one of --spec hutchinson"
            )
        return Result.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "the whole file"
        raise UserError(
            f"{source} is no result of this version ({key}: {problem['msg']}); measure again with "
            f"'python -m curvature run'"
        ) from None


def check_comparable(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Whether two contents of result.json were made on the same microbatches with the same probes.

    Raises:
        UserError: they were not, naming the first setting that differs; or one is not the result of hutchinson.
    """
    _check(*(read_result(content, "a result to compare") for content in (first, second)))


def compare(
    results: Sequence[Result], pairs: Sequence[tuple[int, int]], figure: str, *, level: float
) -> list[Comparison]:
    """Every pair by `paired_difference`, with p-values adjusted over all of them.

    Raises:
        UserError: two results are not comparable, or one lacks the figure.
    """
    for first, second in pairs:
        _check(results[first], results[second])
    values = [result.values(figure) for result in results]
    estimates = [estimate_mean(one, level=level) for one in values]
    differences = [paired_difference(values[first], values[second], level) for first, second in pairs]
    adjusted = holm([difference.p_value for difference in differences])
    compared = []
    for (first, second), difference, p in zip(pairs, differences, adjusted, strict=True):
        apart = p <= 1 - level
        compared.append(
            Comparison(
                first,
                second,
                estimates[first].mean,
                estimates[second].mean,
                difference,
                math.hypot(estimates[first].standard_error, estimates[second].standard_error),
                p,
                ("higher" if difference.value > 0 else "lower") if apart else "not told apart",
            )
        )
    return compared


def _check(first: Result, second: Result) -> None:
    settings = [_settings(result) for result in (first, second)]
    for what, of_first in settings[0].items():
        if of_first != (of_second := settings[1][what]):
            raise UserError(
                f"{first.label} and {second.label} were not measured on the same pairs of microbatch and probe: {what} "
                f"{of_first!s:.12} and {of_second!s:.12}; measure both with the same settings, without --relative-error"
            )


def _settings(result: Result) -> dict[str, Any]:
    """What has to agree, by the option that decides it."""
    options = {f"--{key.replace('_', '-')}": value for key, value in result.spec.model_dump(exclude={"data"}).items()}
    microbatches = len(result.measured.trace.per_microbatch)
    return {"--data": result.spec.data.bin_sha256} | options | {"number of microbatches": microbatches}
