"""Which of two models has the higher figure: paired over what both were measured on, with Holm's correction.

The intervals of a result say how far another draw of documents would move it; two models are measured on the same
documents, so most of that is common to both and tells nothing of their difference. Traces are measured on the same
microbatches with the same probes.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from curvature import comparison as traces
from quant_eval.comparing import read_result
from quant_eval.comparison import Result, compare
from study.layout import curvature_result, quantization_result
from study.settings import MeasuredModel
from study.steps import INTERVAL_LEVEL
from train.command import UserError

SAMPLES = 10_000  # resamplings of the documents; a p-value is never below their reciprocal
SEED = 0
Row = dict[str, Any]
Verdict = Literal["higher", "lower", "not told apart"]
Order = dict[tuple[str, str], Verdict]  # labels of two models -> how the second lies to the first
TRACE = "curvature/trace"


class Paired:
    """Comparisons of rows of a study's table, by what their results hold of every document or microbatch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._results: dict[Path, Result] = {}

    def verdicts(self, pairs: Sequence[tuple[Row, Row]], spec: str, figure: str) -> list[Verdict]:
        """How the second row of each pair lies to the first, at `INTERVAL_LEVEL` after Holm's correction over them.

        Raises:
            UserError: a result is missing, damaged, of other documents, or newer than the table.
        """
        if not pairs:
            return []
        paths = [tuple(self._path(row, spec) for row in pair) for pair in pairs]
        places = {path: index for index, path in enumerate(dict.fromkeys(path for pair in paths for path in pair))}
        results = [self._read(path) for path in places]
        compared = compare(
            results,
            [(places[first], places[second]) for first, second in paths],
            figure,
            samples=SAMPLES,
            level=INTERVAL_LEVEL,
            seed=SEED,
        )
        for pair, of_pair, one in zip(pairs, paths, compared, strict=True):
            for row, path, value in zip(pair, of_pair, (one.first_value, one.second_value), strict=True):
                _check(path, row, f"quant/{spec}/{figure}", value)
        return [one.verdict for one in compared]

    def order(self, rows: dict[str, Row], spec: str, figure: str) -> Order:
        """Every pair of labelled rows; Holm's correction is over all of them."""
        return _ordered(rows, lambda pairs: self.verdicts(pairs, spec, figure))

    def traces(self, pairs: Sequence[tuple[Row, Row]]) -> list[Verdict]:
        """How the trace of the Hessian of the second row of each pair lies to that of the first, likewise.

        Raises:
            UserError: a result is missing, damaged, of other microbatches or probes, or newer than the table.
        """
        verdicts: list[Verdict] = []
        rows = [row for pair in pairs for row in pair]
        paths = [self.directory / curvature_result(row["run"], MeasuredModel(row["step"])) for row in rows]
        results = [traces.read_result(_content(path), str(path)) for path in paths]
        places = [(2 * index, 2 * index + 1) for index in range(len(pairs))]
        for one in traces.compare(results, places, traces.TRACE, level=INTERVAL_LEVEL):
            for place, value in ((one.first, one.first_value), (one.second, one.second_value)):
                _check(paths[place], rows[place], TRACE, value)
            verdicts.append(one.verdict)
        return verdicts

    def order_of_traces(self, rows: dict[str, Row]) -> Order:
        """Every pair of labelled rows by their traces; Holm's correction is over all of them."""
        return _ordered(rows, self.traces)

    def _path(self, row: Row, spec: str) -> Path:
        return self.directory / quantization_result(row["run"], MeasuredModel(row["step"], row["average"]), spec)

    def _read(self, path: Path) -> Result:
        if path not in self._results:
            self._results[path] = read_result(path)
        return self._results[path]


def _ordered(rows: dict[str, Row], verdicts: Callable[[list[tuple[Row, Row]]], list[Verdict]]) -> Order:
    pairs = list(combinations(rows, 2))
    return dict(zip(pairs, verdicts([(rows[first], rows[second]) for first, second in pairs]), strict=True))


def _check(path: Path, row: Row, column: str, value: float) -> None:
    if not math.isclose(row[column], value, rel_tol=1e-6, abs_tol=1e-9):
        figure = column.rpartition("/")[2]
        raise UserError(f"{path} has another {figure} than the table; run 'python -m study collect' again")


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; run the study again") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{path} is not valid JSON; remove it and run the study again") from None
