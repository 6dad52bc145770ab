"""The cooldowns of a study, from its table: measured ones to learn from, and one to forecast.

The error is the KL divergence: positive whatever the noise, so it has a logarithm.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from dynamics.forecast.miniature import is_miniature, miniature_of
from dynamics.forecast.models import Cooldown
from study.axes import AnyRun
from study.definition import Study
from study.measurements.curvature import TRACE
from study.paths import MeasuredModel, quantization_result
from study.released import stage_before
from study.results.collect import collect_rows
from study.results.summary import Rows, at_high_rate, lineage, summarize
from study.results.table import Row, trained
from train.run.config import RunConfig

ERROR = "kl_divergence"
# The unit of the learning rate: where all cooldowns grow the tokens alike, it does not matter.
UNIT_RATE = 1e-3


@dataclass(frozen=True)
class Source:
    """A study with its table and its directory, where results are that no column holds."""

    study: Study
    rows: Rows
    directory: Path

    @classmethod
    def read(cls, directory: Path, study: Study) -> "Source":
        """Return a study with all that is measured by now; it may be under way."""
        return cls(study, collect_rows(directory, study).rows, directory)

    def cooldowns(self, spec: str) -> list[Cooldown]:
        """Return every cooldown whose start and end are measured with this spec."""
        cooldowns = []
        for end in summarize(self.study, self.rows):
            if end.first is None or end.last is None or is_miniature(end.run):
                continue
            error = _error(end.last, spec)
            start = self.at(end.run, end.first, spec)
            if start and error and end.last["tokens"]:
                cooldowns.append(replace(start, tokens_end=end.last["tokens"], error_end=error))
        return cooldowns

    def at(self, run: AnyRun, start: Row, spec: str) -> Cooldown | None:
        """Return the cooldown of a run that starts at a row, from rows up to there alone.

        Its end is the start, as no row here says where it ends. None where the error there is not
        measured.
        """
        past = [
            (row["tokens"], error)
            for row in self.stable(run, start)
            if row["tokens"] and (error := _error(row, spec))
        ]
        if not past or past[-1][0] != start["tokens"]:
            return None
        holder = self._holder(run)
        return Cooldown(
            label=self._label(self.study.label_of(run)),
            group=self._label(self.study.group_of(run).label),
            stem=self._label(self.study.group_of(holder).label),
            step=start["step"],
            past=tuple(past),
            tokens_end=start["tokens"],
            error_end=None,
            signals=dict(self._signals(run, start, spec)),
        )

    def stable(self, run: AnyRun, last: Row | None = None) -> list[Row]:
        """Return the weights of a run's lineage at its high rate, up to a row of it."""
        led = list(lineage(self.study, self.rows, run))
        if last is not None:
            led = led[: [row is last for row in led].index(True) + 1]
        if isinstance(run, RunConfig):
            return [row for row in trained(led) if row["phase"] == "stable"]
        return list(at_high_rate(led))

    def _signals(self, run: AnyRun, start: Row, spec: str) -> Iterator[tuple[str, float]]:
        if rate := start.get("peak_lr"):
            yield "learning rate", math.log(rate / UNIT_RATE)
        traces = [row.get(TRACE) for row in self.stable(run, start)]
        if traces and traces[0] and traces[-1] and traces[0] > 0 and traces[-1] > 0:
            yield "trace", math.log(traces[-1] / traces[0])

        small = miniature_of(self.study.trained, start["run"], start["step"])
        end = small and next((row for row in self.rows if row["run"] == small.name), None)
        if not end:
            return
        before, after = _error(start, spec), _error(end, spec)
        if before and after:
            yield "error", math.log(after / before)
        outputs = [self._layer_output_error(row, spec) for row in (start, end)]
        if outputs[0] and outputs[1]:
            yield "layer output error", math.log(outputs[1] / outputs[0])

    def _layer_output_error(self, row: Row, spec: str) -> float | None:
        """Return the mean over linears of |W x - Wq x|^2 / |W x|^2 on the calibration text."""
        path = self.directory / quantization_result(row["run"], MeasuredModel(row["step"]), spec)
        if not path.exists():
            return None
        layers = read_result(path, Quantization).measured.layers
        errors = [layer.relative_output_error for layer in layers if layer.relative_output_error]
        return sum(errors) / len(errors) if errors else None

    def _holder(self, run: AnyRun) -> AnyRun:
        """Return the run that holds the stable phase."""
        if isinstance(run, RunConfig):
            return self.study.parent_of(run) if run.branch_from else run
        before = stage_before(self.study.runs, run)
        return self._holder(before) if before else run

    def _label(self, label: str) -> str:
        return f"{self.study.name}: {label}"


def _error(row: Row, spec: str) -> float | None:
    """Return the error of a row; None where it is not measured, or has no logarithm."""
    error = row.get(f"quant/{spec}/{ERROR}")
    return error if error and error > 0 else None


def all_cooldowns(sources: Sequence[Source], spec: str) -> list[Cooldown]:
    """Return the cooldowns of all studies."""
    return [cooldown for source in sources for cooldown in source.cooldowns(spec)]
