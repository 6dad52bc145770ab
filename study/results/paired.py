"""Estimates of differences between models, paired over the documents both were measured on.

The intervals of a result say how far another draw of documents would move it; two models are
measured on the same documents, so most of that is common to both and tells nothing of their
difference.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from base.errors import UserError
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import Result, read_result
from quant_eval.compare import crossed
from quant_eval.estimate import Crossed, Estimate, estimate_of
from study.definition import load_study
from study.measurements.kind import Column
from study.paths import MeasuredModel, quantization_result
from study.results.table import Row

Weighted = list[tuple[Row, float]]  # rows whose figures are summed, each times a factor


def runs_of(replicates: Iterable[Weighted]) -> set[str]:
    """Return the names of the runs whose figures are summed."""
    return {row["run"] for weighted in replicates for row, _ in weighted}


class Paired:
    """Estimates over rows of the table, by their results for every document."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._results: dict[Path, Result[Quantization]] = {}

    def estimate(
        self, replicates: Sequence[Weighted], spec: str, figure: Column, minus: str = ""
    ) -> Estimate:
        """Return the mean over seeds of a weighted sum of a figure of several models.

        The figure is that at `spec`, less that at the spec `minus` where one is given.

        Each replicate holds the models of one seed, with their weights.

        Raises:
            UserError: as for `crossed`.
        """
        return estimate_of(self.crossed(replicates, spec, figure, minus))

    def crossed(
        self, replicates: Sequence[Weighted], spec: str, figure: Column, minus: str = ""
    ) -> Crossed:
        """Return a weighted sum of a figure of several models by seed, document and draw.

        Raises:
            UserError: a result is missing, damaged or newer than the table, or cannot be compared
                with the others (`quant_eval.compare.crossed`).
        """
        terms = [
            [
                (sign * weight, self._result(row, each, figure))
                for row, weight in weighted
                # An empty `minus` has no term.
                for sign, each in ((1, spec), (-1, minus))
                if each
            ]
            for weighted in replicates
        ]
        return crossed(terms, figure.figure)

    @cached_property
    def _models(self) -> dict[tuple[str, int, str | None], MeasuredModel]:
        study = load_study(self.directory)
        return {
            (run.name, model.step, model.average): model
            for run in study.runs
            for model in study.models_of(run)
        }

    def _model(self, row: Row) -> MeasuredModel:
        return self._models[row["run"], row["step"] or 0, row["average"]]

    def _result(self, row: Row, spec: str, figure: Column) -> Result[Quantization]:
        path = self.directory / quantization_result(row["run"], self._model(row), spec)
        if path not in self._results:
            self._results[path] = read_result(path, Quantization)
        result = self._results[path]
        _check(path, row, figure.of(spec), getattr(result.measured, figure.figure))
        return result


def _check(path: Path, row: Row, column: str, value: float | None) -> None:
    if value is None or not math.isclose(row[column], value, rel_tol=1e-6, abs_tol=1e-9):
        figure = column.rpartition("/")[2]
        raise UserError(
            f"{path} has another {figure} than the table; run 'python -m study collect' again"
        )
