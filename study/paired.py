"""Which of two models has the higher figure: paired over the documents of the evaluation text, with Holm's correction.

The intervals of a result say how far another draw of documents would move it; two models are measured on the same
documents, so most of that is common to both and tells nothing of their difference.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from quant_eval.comparing import read_result
from quant_eval.comparison import Result, compare
from study.settings import MeasuredModel
from study.steps import INTERVAL_LEVEL, quantization_result
from train.command import UserError

SAMPLES = 10_000  # resamplings of the documents; a p-value is never below their reciprocal
SEED = 0
Row = dict[str, Any]
Verdict = Literal["higher", "lower", "not told apart"]
Order = dict[tuple[str, str], Verdict]  # labels of two models -> how the second lies to the first


class Paired:
    """Comparisons of rows of a study's table, by the losses that their results hold document by document."""

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
                if not math.isclose(row[f"quant/{spec}/{figure}"], value, rel_tol=1e-6, abs_tol=1e-9):
                    raise UserError(f"{path} has another {figure} than the table; run 'python -m study collect' again")
        return [one.verdict for one in compared]

    def order(self, rows: dict[str, Row], spec: str, figure: str) -> Order:
        """Every pair of labelled rows; Holm's correction is over all of them."""
        pairs = list(combinations(rows, 2))
        verdicts = self.verdicts([(rows[first], rows[second]) for first, second in pairs], spec, figure)
        return dict(zip(pairs, verdicts, strict=True))

    def _path(self, row: Row, spec: str) -> Path:
        return self.directory / quantization_result(row["run"], MeasuredModel(row["step"], row["average"]), spec)

    def _read(self, path: Path) -> Result:
        if path not in self._results:
            self._results[path] = read_result(path)
        return self._results[path]
