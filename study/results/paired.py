"""Estimates of differences between models, paired over the documents both were measured on.

The intervals of a result say how far another draw of documents would move it; two models are
measured on the same documents, so most of that is common to both and tells nothing of their
difference.

Shapes: D documents.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import UserError
from base.statistics import LEAST_DOCUMENTS
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import Result, read_result
from quant_eval.compare import drawn_fraction
from study.definition import load_study
from study.paths import MeasuredModel, quantization_result
from study.results.estimate import Crossed, Estimate, contrast_of, estimate_of
from study.results.table import Row

Weighted = list[tuple[Row, float]]  # rows whose figures are summed, each times a factor


class Paired:
    """Estimates over rows of the table, by their results for every document."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._results: dict[Path, Result[Quantization]] = {}

    def estimate(
        self, replicates: Sequence[Weighted], spec: str, figure: str, minus: str = ""
    ) -> Estimate:
        """Return the mean over seeds of a weighted sum of a figure of several models.

        The figure is that at `spec`, less that at the spec `minus` where one is given.

        Each replicate holds the models of one seed, with their weights.

        Raises:
            UserError: as for `crossed`.
        """
        return estimate_of(self.crossed(replicates, spec, figure, minus))

    def crossed(
        self, replicates: Sequence[Weighted], spec: str, figure: str, minus: str = ""
    ) -> Crossed:
        """Return a weighted sum of a figure of several models by seed, document and draw.

        Each replicate holds the models of one seed, with their weights. The sum of ratios C_sk =
        sum_r w_r sum(a_r) / sum(b_r), over documents, of seed s and calibration draw k is taken
        apart into documents by jackknife pseudo-values (Tukey 1958): D C_sk - (D - 1) C_sk without
        the document, which are the documents' own values where all models share the numbers of
        tokens and those are equal.

        Raises:
            UserError: a result is missing, damaged, newer than the table, of few documents, or of
                other documents, settings or numbers of calibration draws than the others.
        """
        read = [
            [
                (sign * weight, self._result(row, each, figure))
                for row, weight in weighted
                for sign, each in ((1, spec), (-1, minus))
                if each
            ]
            for weighted in replicates
        ]
        results = [result for weighted in read for _, result in weighted]
        _check_alike(results)
        contrasts = [
            contrast_of(
                [(weight, *drawn_fraction(result.measured, figure)) for weight, result in weighted]
            )
            for weighted in read
        ]
        return Crossed(
            np.stack([pseudo_DK for _, pseudo_DK in contrasts]),
            value=float(np.mean([contrast_K.mean() for contrast_K, _ in contrasts])),
            tokens_D=np.asarray(results[0].measured.per_document.tokens, dtype=np.float64),
        )

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

    def _result(self, row: Row, spec: str, figure: str) -> Result[Quantization]:
        path = self.directory / quantization_result(row["run"], self._model(row), spec)
        if path not in self._results:
            self._results[path] = read_result(path, Quantization)
        result = self._results[path]
        _check(path, row, f"quant/{spec}/{figure}", getattr(result.measured, figure))
        return result


def _check_alike(results: Sequence[Result[Quantization]]) -> None:
    """Raise UserError for few documents, other settings or other numbers of calibration draws."""
    documents = len(results[0].measured.per_document.tokens)
    if documents < LEAST_DOCUMENTS:
        raise UserError(
            f"{results[0].model.path} was evaluated on {documents} documents, which decide nothing;"
            f" raise eval_tokens until there are {LEAST_DOCUMENTS} and run the study again"
        )
    shared = _settings(results[0])
    for result in results[1:]:
        differing = [name for name, value in _settings(result).items() if value != shared.get(name)]
        if differing:
            raise UserError(
                f"{results[0].model.path} and {result.model.path} differ in {differing[0]};"
                " move one of the results away and run the study again"
            )


def _settings(result: Result[Quantization]) -> dict[str, Any]:
    """Return the settings that two evaluations share if they can be paired, by name."""
    evaluation = {"sha256": None} | dict(result.spec.evaluation or ())
    per_document = result.measured.per_document
    settings = {"the text": evaluation.pop("sha256"), "dtype": result.spec.dtype, **evaluation}
    calibration = result.measured.calibration
    settings |= {"the documents": per_document.document}
    settings |= {"calibration draws": len(calibration.per_document.kl) if calibration else 1}
    return settings | {"the documents' numbers of tokens": per_document.tokens}


def _check(path: Path, row: Row, column: str, value: float | None) -> None:
    if value is None or not math.isclose(row[column], value, rel_tol=1e-6, abs_tol=1e-9):
        figure = column.rpartition("/")[2]
        raise UserError(
            f"{path} has another {figure} than the table; run 'python -m study collect' again"
        )
