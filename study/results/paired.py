"""Comparisons of two models, paired over what both were measured on, with Holm's correction.

The intervals of a result say how far another draw of documents would move it; two models are
measured on the same documents, so most of that is common to both and tells nothing of their
difference. Traces are measured on the same microbatches with the same probes.

Shapes: D documents.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np

from base.errors import UserError
from base.statistics import Verdict
from ckpt_tools.hf.measured import Curvature, Quantization
from ckpt_tools.hf.results import Result, read_result
from curvature import paired_traces as of_traces
from quant_eval.compare import Comparison, compare, fraction
from quant_eval.measuring.bootstrap import Resampled, Statistic, resample
from study.definition import load_study
from study.measurements.kind import INTERVAL_LEVEL
from study.paths import MeasuredModel, curvature_result, quantization_result
from study.results.table import Row

SAMPLES = 10_000  # resamplings of the documents; a p-value is never below their reciprocal
SEED = 0
Measured = tuple[Row, str]  # a model, and the spec that it was quantized with
Order = dict[tuple[str, str], Verdict]  # labels of two models -> how the second lies to the first
TRACE = "curvature/trace"


class Paired:
    """Comparisons of rows of the table, by their results for every document or microbatch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._results: dict[Path, Result[Quantization]] = {}

    def compared(
        self, pairs: Sequence[tuple[Measured, Measured]], figure: str, other: "Paired | None" = None
    ) -> list[Comparison]:
        """Compare the second model of each pair with the first, with Holm's correction over them.

        The second of each pair is of the study of `other`, where that is given.

        Raises:
            UserError: a result is missing, damaged, of other documents, or newer than the table.
        """
        if not pairs:
            return []
        paths = [(self._path(*first), (other or self)._path(*second)) for first, second in pairs]
        places = {
            path: index
            for index, path in enumerate(dict.fromkeys(path for pair in paths for path in pair))
        }
        found = compare(
            [self._read(path) for path in places],
            [(places[first], places[second]) for first, second in paths],
            figure,
            samples=SAMPLES,
            level=INTERVAL_LEVEL,
            seed=SEED,
        )
        for pair, of_pair, one in zip(pairs, paths, found, strict=True):
            for (row, spec), path, value in zip(
                pair, of_pair, (one.first_value, one.second_value), strict=True
            ):
                _check(path, row, f"quant/{spec}/{figure}", value)
        return found

    def contrast(self, weighted: Sequence[tuple[Row, float]], spec: str, figure: str) -> Resampled:
        """Return the weighted sum of a figure of several models, by a bootstrap of their documents.

        C = sum_k w_k R_k with ratios R_k = sum(a_k) / sum(b_k) over documents. What is resampled is
        C linearised in the documents, sum_k w_k (a_kD - R_k b_kD) / sum(b_k): exact where all
        models share the denominator, the number of tokens; the relative error's differ by as much
        as the losses of the models do.

        Raises:
            UserError: as for `compared`, or of other settings of the evaluation.
        """
        paths = [self._path(row, spec) for row, _ in weighted]
        results = [self._read(path) for path in paths]
        for result in results[1:]:
            differs = other_text(results[0], result)
            if differs:
                raise UserError(
                    f"{results[0].model.path} and {result.model.path} differ in {differs}; remove"
                    " one of the results and run the study again"
                )
        tokens_D = np.asarray(results[0].measured.per_document.tokens, dtype=np.float64)
        value, influence_D = 0.0, np.zeros(len(tokens_D))
        for (row, weight), path, result in zip(weighted, paths, results, strict=True):
            a_D, b_D = fraction(result.measured.per_document, figure)
            ratio = float(a_D.sum() / b_D.sum())
            _check(path, row, f"quant/{spec}/{figure}", ratio)
            value += weight * ratio
            influence_D += weight * (a_D - ratio * b_D) / b_D.sum()
        statistic = Statistic(figure, (value * tokens_D + tokens_D.sum() * influence_D, tokens_D))
        (resampled,) = resample([statistic], [None], samples=SAMPLES, seed=SEED)
        return resampled

    def result(self, row: Row, spec: str) -> Result[Quantization]:
        """Return the result of a model with its sums by document."""
        return self._read(self._path(row, spec))

    def order(self, rows: dict[str, Row], spec: str, figure: str) -> Order:
        """Return the order of every pair of rows; Holm's correction is over all of them."""
        pairs = list(combinations(rows, 2))
        measured = [((rows[first], spec), (rows[second], spec)) for first, second in pairs]
        found = self.compared(measured, figure)
        return {pair: one.verdict for pair, one in zip(pairs, found, strict=True)}

    def order_of_traces(self, rows: dict[str, Row]) -> Order:
        """Return the order of every pair by their traces; Holm's correction is over all of them."""
        pairs = list(combinations(rows, 2))
        found = self.compared_traces([(rows[first], rows[second]) for first, second in pairs])
        return {pair: one.verdict for pair, one in zip(pairs, found, strict=True)}

    def compared_traces(self, pairs: Sequence[tuple[Row, Row]]) -> list[of_traces.Comparison]:
        """Compare the trace of the second row of each pair with that of the first.

        Raises:
            UserError: a result is missing, damaged, of other microbatches or probes, or newer than
                the table.
        """
        rows = [row for pair in pairs for row in pair]
        paths = [self.directory / curvature_result(row["run"], self._model(row)) for row in rows]
        results = [read_result(path, Curvature) for path in paths]
        places = [(2 * index, 2 * index + 1) for index in range(len(pairs))]
        found = of_traces.compare(results, places, of_traces.TRACE, level=INTERVAL_LEVEL)
        for one in found:
            for place, value in ((one.first, one.first_value), (one.second, one.second_value)):
                _check(paths[place], rows[place], TRACE, value)
        return found

    @cached_property
    def _models(self) -> dict[tuple[str, int, str | None], MeasuredModel]:
        study = load_study(self.directory)
        return {
            (run.name, model.step, model.average): model
            for run in study.runs
            for model in study.models_of(run)
        }

    def _model(self, row: Row) -> MeasuredModel:
        return self._models[row["run"], row["step"], row["average"]]

    def _path(self, row: Row, spec: str) -> Path:
        return self.directory / quantization_result(row["run"], self._model(row), spec)

    def _read(self, path: Path) -> Result[Quantization]:
        if path not in self._results:
            self._results[path] = read_result(path, Quantization)
        return self._results[path]


def other_text(first: Result[Quantization], second: Result[Quantization]) -> str | None:
    """Return the setting in which two evaluations differ; None where they can be paired."""
    both = [
        dict(result.spec.evaluation or ())
        | {"dtype": result.spec.dtype}
        | {key: getattr(result.measured.per_document, key) for key in ("document", "tokens")}
        for result in (first, second)
    ]
    names = {
        "sha256": "the text",
        "document": "the documents",
        "tokens": "the documents' numbers of tokens",
    }
    return next(
        (names.get(key, key) for key, value in both[0].items() if value != both[1][key]), None
    )


def _check(path: Path, row: Row, column: str, value: float) -> None:
    if not math.isclose(row[column], value, rel_tol=1e-6, abs_tol=1e-9):
        figure = column.rpartition("/")[2]
        raise UserError(
            f"{path} has another {figure} than the table; run 'python -m study collect' again"
        )
