"""The results of a study, and panels of them along its training."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from base.grouping import grouped
from ckpt_tools.hf.measured import Read
from ckpt_tools.hf.results import read_result
from study.axes import AnyRun
from study.definition import Study
from study.figures.charts import (
    BAND,
    PLACE,
    SHADE,
    Chart,
    Quantity,
    Rows,
    Span,
    band_of,
    data,
    line,
    marks,
    means_of,
    ordered,
    panel,
    replicates_of,
)
from study.figures.looks import GREY, Look, runs_of
from study.released import ReleasedRun, is_after_pretraining
from study.results.summary import lineage
from study.results.table import Row
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.schedules import first_step, learning_rate

Place = Mapping[str, float | int | None]  # columns
MOST_RATES = 150  # points of a curve of learning rates, its corners aside
RATE = "learning rate / its peak"
CURVE = "schedule"  # number of a curve of learning rates
AFTER = "place after pretraining"  # number among the stages that follow it
HEADING = "after pretraining, in order"
WEIGHTS = "weights"  # the series of the weights as training left them


def described(row: Row, panel_title: str, look: Look, **more: str) -> dict[str, Any]:
    """Return what is known of a row besides what is drawn."""
    head = {"panel": panel_title, "run": look.label} | more
    facts = {"step": row["step"], "tokens": row["tokens"]}
    return head | facts | {"learning rate": row["learning_rate"], "phase": row["phase"]}


def interval_of(row: Row, column: str) -> Span | None:
    """Return the ends of the bar of a value; None for one without.

    They are beside it in the table. An eigenvalue has a residual instead: its distance to the
    nearest one at most.
    """
    if f"{column}_low" in row:
        return row[f"{column}_low"], row[f"{column}_high"]
    if f"{column}_residual" in row:
        # The residual is relative to the eigenvalue.
        reach = row[f"{column}_residual"] * abs(row[column])
        return row[column] - reach, row[column] + reach
    return None


class Canvas:
    """The results of a study, and panels of them against the tokens of training."""

    def __init__(self, study: Study, table: Sequence[Row], directory: Path) -> None:
        self.study, self.table, self.directory = study, table, directory
        self.runs = runs_of(study)
        # By name the stages whose places are in order, as their tokens are of no pretraining.
        self.after = {
            run.name: run
            for run in study.runs
            if isinstance(run, ReleasedRun) and is_after_pretraining(study.runs, run)
        }
        planned = [run.total_tokens for run in study.trained]
        on_axis = (row for row in table if row["run"] not in self.after)
        reached = [row["tokens"] for row in on_axis if row["tokens"] is not None]
        self.most_tokens = max([*planned, *reached], default=1)
        # One unit for all figures of the study, by the longest run.
        billions = self.most_tokens >= 1e9
        self.unit = 1e9 if billions else 1e6
        end = 1.02 * self.most_tokens / self.unit
        unit = "billion" if billions else "million"
        measured = {row["run"] for row in table}
        stages = dict.fromkeys(run.stage for name, run in self.after.items() if name in measured)
        self.tokens = Quantity("training tokens", unit, domain=(0.0, end), in_order=tuple(stages))
        self.rates = self._rates()
        self._metrics: dict[str, Rows] = {}  # by run, read once: a probe has many figures in it

    def undashed(self) -> "Canvas":
        """Return a canvas with solid lines of controls, as dashes mean something else there."""
        other = copy(self)
        other.runs = self.runs.undashed
        return other

    def rows_of(self, run: str, column: str, average: str | None = None) -> list[Row]:
        """Return the rows of a run's weights, or of an average, that hold column and tokens."""
        rows = [] if run in self.after else self._holding(run, column, average)
        return [row for row in rows if row["tokens"] is not None]

    def _holding(self, run: str, column: str, average: str | None) -> list[Row]:
        of_run = (row for row in self.table if row["run"] == run and row["average"] == average)
        return [row for row in of_run if row[column] is not None]

    def _placed(self, run: str, column: str, average: str | None) -> Iterator[tuple[Row, Place]]:
        """Yield the rows of a run that hold a column, with the columns of their places along it.

        A stage after pretraining has its number in place of tokens, and room for its revisions.
        """
        stage = self.after.get(run)
        if stage is None:
            for row in self.rows_of(run, column, average):
                yield row, self.tokens.values(row["tokens"] / self.unit)
            return
        # An average is at the place of the last revision that it takes in.
        steps = [revision.step for revision in stage.fetched]
        for row in self._holding(run, column, average):
            # A stage of which nothing is measured has no place, and no rows.
            number = self.tokens.in_order.index(stage.stage) + 1
            share = (steps.index(row["step"]) + 0.5) / len(steps)
            place = self.tokens.place_of(stage.stage, share)
            yield row, {self.tokens.label: None, PLACE: place, AFTER: number}

    def last_rows(self, column: str) -> dict[str, Row]:
        """Return run -> the row of its last weights, where it holds the column."""
        last = {run.name: run.total_steps for run in self.study.runs}
        weights = (row for row in self.table if row["average"] is None)
        ends = {row["run"]: row for row in weights if row["step"] == last[row["run"]]}
        return {
            run: ends[run]
            for run in self.runs.looks
            if run in ends and ends[run][column] is not None
        }

    def results[Kind: Read](
        self, path_of: Callable[[AnyRun], str], kind: type[Kind]
    ) -> dict[str, Kind]:
        """Return what is measured, by the label of its run, in the order of the runs."""
        runs = {run.name: run for run in self.study.runs}
        by_label = {}
        for name, look in self.runs.looks.items():
            path = self.directory / path_of(runs[name])
            if path.exists():
                by_label[look.label] = read_result(path, kind).measured
        return by_label

    def along(
        self,
        quantity: Quantity,
        column: str,
        title: str,
        *,
        has_bars: bool = True,
        average: str | None = None,
        series: str = WEIGHTS,
    ) -> Rows:
        """Return a column against tokens: of every run's weights, or of an average of them."""
        rows = []
        for run, look in self.runs.looks.items():
            for row, place in self._placed(run, column, average):
                values = quantity.values(
                    row[column], interval_of(row, column) if has_bars else None
                )
                rows.append(described(row, title, look, series=series) | {**place} | values)
        return rows

    def during(
        self, quantity: Quantity, key: str, title: str, runs: Iterable[str], *, series: str
    ) -> Rows:
        """Return a figure of metrics.jsonl against tokens, of these runs."""
        rows = []
        for run in runs:
            head = {"panel": title, "run": self.runs.looks[run].label, "series": series}
            if run not in self._metrics:
                self._metrics[run] = read_metrics(RunDirectory(self.directory / run).metrics)
            for row in self._metrics[run]:
                if key in row:
                    values = self.tokens.values(row["tokens"] / self.unit)
                    values |= quantity.values(row[key])
                    rows.append(head | {"step": row["step"], "tokens": row["tokens"]} | values)
        return rows

    def at_the_end(self, quantity: Quantity, column: str, title: str, **more: str) -> Rows:
        """Return a column of every run's last weights, where it is measured."""
        return [
            described(row, title, self.runs.looks[run], **more)
            | quantity.values(row[column], interval_of(row, column))
            for run, row in self.last_rows(column).items()
        ]

    def since(self, rows: Rows, tokens: float) -> Rows:
        """Return the rows of so many tokens or more, and all of what follows pretraining."""
        label = self.tokens.label
        return [row for row in rows if row[label] is None or row["tokens"] >= tokens]

    def curves(self, rows: Rows, quantity: Quantity, columns: int, **more: Any) -> Chart:
        """Return the panel of rows of `along`, named as they are; `more` is of the marks."""
        weights = [row for row in rows if row["series"] == WEIGHTS]
        layers = [
            *self.links(weights, self.tokens, quantity, self.runs.dash),
            marks(rows, self.runs, self.tokens, quantity, **more),
        ]
        return self.panel(layers, rows[0]["panel"], columns)

    def panel(self, layers: Sequence[Chart], title: str, columns: int) -> Chart:
        """Return layers against tokens, over the anneal and beside the learning rates."""
        values: Chart = {"layer": [*self._shade(), *ordered(self.tokens, HEADING), *layers]}
        chart = panel([values, *self._rate_lines()], title, columns)
        return chart | {"resolve": {"scale": {"y": "independent"}}}

    def links(self, rows: Rows, x: Quantity, y: Quantity, dash: Chart) -> list[Chart]:
        """Return lines from the checkpoints that branches start from to their own first ones.

        Each series of a branch is linked to the same of its parent. `dash` is the encoding of
        dashes, which a figure has one scale of; empty: the lines are solid.
        """
        # Of a model whose source states no step, `MeasuredModel` has step 0.
        by_place = grouped(rows, lambda row: (row["run"], row["step"] or 0, row["series"]))
        own = grouped(rows, lambda row: (row["run"], row["series"]))
        # Replicates have one place along training, not on other axes.
        match = x.field if x is self.tokens else "tokens"
        ends = Rows()
        for run in self.study.runs:
            before = self.study.origin(run)
            if before is None:
                continue
            label, (parent, weights) = self.runs.looks[run.name].label, before
            parent_label = self.runs.looks[parent.name].label
            for series in dict.fromkeys(row["series"] for row in rows):
                starts = by_place.get((parent_label, weights.step, series), [])
                # From the checkpoint in the parent to the first one of the branch itself.
                first = own.get((label, series), [])[:1]
                if starts and first:
                    kept = dict.fromkeys((x.field, y.label, "series", match))
                    ends += [
                        {"run": label} | {name: row[name] for name in kept}
                        for row in (*starts, *first)
                    ]
        if not ends:
            return []
        axes = {"x": x.encoding(), "y": y.encoding(), "color": self.runs.colour}
        axes |= {"strokeDash": dash} if dash else {}
        replicates = replicates_of(ends, self.runs, match)
        if len(replicates) == len(ends):
            return [line(ends, self.runs, axes)]
        means = means_of(replicates, self.runs, x, y)
        band = {"color": self.runs.colour} | band_of(x, y)
        return [data(means, mark=BAND, encoding=band), line(means, self.runs, axes)]

    def _shade(self) -> list[Chart]:
        """Return the anneal where all runs share it."""
        spans = set()
        for run in self.study.runs:
            anneal = run.schedule.anneal if isinstance(run, RunConfig) else None
            if anneal is None or not isinstance(run, RunConfig):
                return []
            tokens = (run.tokens_at(anneal.start_step), run.total_tokens)
            spans.add((tokens[0] / self.unit, tokens[1] / self.unit))
        # Anneals at different places have no common shade.
        if len(spans) != 1:
            return []
        ((start, end),) = spans
        shade: Chart = {"mark": {"type": "rect", "color": SHADE, "tooltip": None}}
        shade["encoding"] = {"x": {"datum": start}, "x2": {"datum": end}}
        mark = {"type": "text", "text": "anneal", "color": "#8a8468", "baseline": "top"}
        at = {"x": {"datum": (start + end) / 2}, "y": {"value": 3}}
        text: Chart = {"mark": mark, "encoding": at}
        return [{"data": {"values": [{}]}} | layer for layer in (shade, text)]

    def _rate_lines(self) -> list[Chart]:
        """Learning rates as shares of their peaks, dotted, on an axis of their own."""
        if not self.rates:
            return []
        colours = dict.fromkeys(("titleColor", "labelColor", "domainColor", "tickColor"), GREY)
        y = {
            "field": RATE,
            "type": "quantitative",
            "title": f"{RATE} (dotted)",
            "scale": {"domain": [0, 1.06], "nice": False},
            "axis": {"orient": "right", "grid": False} | colours,
        }
        colour: Chart = {"value": GREY}
        if any(row["run"] for row in self.rates):
            # The scale of the runs has no colour for a curve of none.
            colour = self.runs.colour | {"condition": {"test": "!datum.run", "value": GREY}}
        mark = {"type": "line", "strokeDash": [1, 2], "strokeWidth": 1.2}
        detail = {"field": CURVE, "type": "nominal"}  # several may belong to no run
        axes = {"x": self.tokens.encoding(), "y": y, "color": colour, "detail": detail}
        return [data(self.rates, mark=mark, encoding=axes)]

    def _rates(self) -> Rows:
        """Learning rates; schedules that coincide are one curve, which belongs to no run."""
        curves: dict[tuple[Span, ...], list[str]] = {}
        for run in self.study.runs:
            curve = _schedule(run) if isinstance(run, RunConfig) else self._released(run)
            if curve:
                curves.setdefault(curve, []).append(run.name)
        rows = []
        for number, (curve, names) in enumerate(curves.items(), 1):
            # A curve that all runs share, or several do, is grey: it belongs to no run.
            entries = {self.runs.looks[name].entry for name in names}
            is_own = len(entries) == 1 and len(curves) > 1
            label = self.runs.looks[names[0]].label if is_own else ""
            head = {"panel": "", "run": label, "series": "learning rate", CURVE: number}
            rows += [
                head | self.tokens.values(tokens / self.unit) | {RATE: share}
                for tokens, share in curve
            ]
        return rows

    def _released(self, run: AnyRun) -> tuple[Span, ...]:
        """Return the known learning rates of a stage of a released model, from that before on."""
        rows = self.rows_of(run.name, "learning_rate")
        before = self.study.origin(run)
        if before and rows:
            rows = [*self.rows_of(before[0].name, "learning_rate")[-1:], *rows]
        path = lineage(self.study, self.table, run)
        peak = max((row["learning_rate"] or 0.0 for row in path), default=0.0)
        shares = [(row["tokens"], row["learning_rate"]) for row in rows]
        return tuple((tokens, rate / peak) for tokens, rate in shares) if peak > 0 else ()


def _schedule(run: RunConfig) -> tuple[Span, ...]:
    """Tokens and learning rate / peak: some MOST_RATES points, the corners among them."""
    peak, start = run.optimizer.peak_lr, first_step(run)
    if peak <= 0:
        return ()
    corners = {start, run.warmup_steps, run.total_steps}
    if run.schedule.anneal:
        corners.add(run.schedule.anneal.start_step)
    # The spacing is rounded up, so there are at most MOST_RATES points beside the corners.
    spaced = range(start, run.total_steps, -(-run.total_steps // MOST_RATES))
    return tuple(
        # Rounded, so that schedules that coincide compare equal in `_rates`.
        (float(run.tokens_at(step)), round(learning_rate(run, step) / peak, 9))
        for step in sorted({*corners, *spaced})
        if step >= start
    )
