"""Several studies side by side: a table of their ends of training, and the error over the size.

Columns are those of the studies' own tables, and what studies differ in: see `SIZE_COLUMNS`. A
column that a study does not have is empty. The law is

    log e = c + a log N + b log(D / N)

by least squares over points: one for each number of parameters N and of tokens D. Runs of the same
N and D differ in learning rate, engine or seed, and their geometric mean is one point: what they
share, such as a misfit of the law, is not a replicate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from base.aligned import wrapped
from base.errors import UserError
from base.files import replaced_file
from base.quantities import with_interval
from base.statistics import INTERVAL_LEVEL
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from dynamics.figures.quantization import AXES
from quant_eval.estimate import ErrorSource, Estimate
from study.axes import AnyRun
from study.definition import Study
from study.figures.charts import DASHED, Chart, Quantity, Rows, columns_of, data, marks, panel
from study.figures.figure import Drawn, drawn, write_figure, write_rows
from study.figures.looks import SHAPES, Runs, looks_for
from study.machine import released_size
from study.measurements.quantization import ERRORS
from study.measurements.titles import spec_title
from study.paths import last_model, quantization_result
from study.released import ReleasedRun, is_after_pretraining
from study.results.summary import RunSummary, enumeration, summarize
from study.results.table import read_table, schema_of
from train.model.config import multiplied_parameters

SIZE_COLUMNS = {
    "label": pa.string(),
    "parameters": pa.int64(),
    "tokens_per_parameter": pa.float64(),
    "evaluation_sha256": pa.string(),
}
End = dict[str, Any]


def ends_of(directory: Path, study: Study) -> list[End]:
    """Return a row for every end of training that the study's table holds."""
    summaries = summarize(study, read_table(directory, study))
    return [_end(directory, study, summary) for summary in summaries if summary.last]


def _end(directory: Path, study: Study, summary: RunSummary) -> End:
    run = summary.run
    end = dict(summary.last or {}) | {"label": summary.label}
    path = directory / quantization_result(run.name, last_model(run), study.quantization.specs[0])
    if path.exists():
        evaluation = read_result(path, Quantization).spec.evaluation
        end["evaluation_sha256"] = evaluation.sha256 if evaluation else None
    # Sizes are named so by OLMo-core's ladder, too.
    end["parameters"] = size = _parameters(study, run)
    if size and end["tokens"] is not None:
        end["tokens_per_parameter"] = end["tokens"] / size
    return end


def _parameters(study: Study, run: AnyRun) -> int | None:
    """Return the size of a run's model; None of a release without config.json, or post-trained.

    Post-training has no place on a law of pretraining.
    """
    if not isinstance(run, ReleasedRun):
        return multiplied_parameters(run.model)
    if run.config is None or is_after_pretraining(study.runs, run):
        return None
    return released_size.multiplied_parameters(run.config)


def write_ends(path: Path, ends: Sequence[End], studies: Sequence[Study]) -> None:
    """Write the ends as parquet, aside and renamed.

    A factor that is a number in one study and a word in another is text.
    """
    types: dict[str, set[pa.DataType]] = {name: {kind} for name, kind in SIZE_COLUMNS.items()}
    for study in studies:
        for field in schema_of(study):
            # The columns of all studies, each once, in the order of the first that has it.
            types.setdefault(field.name, set()).add(field.type)
    # A column has one type: where one study has words, numbers of the others become text.
    texts = {name for name, kinds in types.items() if len(kinds) > 1 and pa.string() in kinds}
    columns = {
        name: pa.string() if name in texts else pa.float64() if len(kinds) > 1 else kinds.pop()
        for name, kinds in types.items()
    }
    rows = [
        {
            name: str(value) if name in texts and value is not None else value
            for name, value in end.items()
        }
        for end in ends
    ]
    with replaced_file(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema([*columns.items()])), aside)


FEWEST_SIZES = 3
SAME = 1e-6  # relative; tokens per parameter that differ by less are one value
SCATTER = "scatter of the points"
PARAMETERS, PER_PARAMETER = "N", "D/N"


class SizePoint(NamedTuple):
    """An error, above 0, at a size of N parameters and a budget of D tokens."""

    parameters: float
    tokens: float
    error: float


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law.

    Attributes:
        exponents: of N, and of D/N where the points differ in it.
        scale: the error at the geometric means of N and D/N.
        means: those geometric means.
        points: how many it is fitted to.
    """

    exponents: Mapping[str, Estimate]
    scale: float
    means: Mapping[str, float]
    points: int

    def at(self, parameters: float) -> float:
        """Return the error at a size, at the mean tokens per parameter."""
        distance = math.log(parameters / self.means[PARAMETERS])
        return self.scale * math.exp(self.exponents[PARAMETERS].value * distance)


def merged(points: Sequence[SizePoint]) -> list[SizePoint]:
    """Return a point per size and budget, the geometric mean of those that share both.

    Example:
        >>> merged([SizePoint(1e6, 2e7, 0.1), SizePoint(1e6, 2e7, 0.4)])[0].error
        0.2
    """
    places: dict[tuple[float, float], list[float]] = {}
    for point in points:
        if point.error <= 0:
            raise UserError(
                f"an error at {point.parameters:.3g} parameters is {point.error:.3g}, which has no"
                " logarithm; measure it on more text"
            )
        # Logs are averaged, which makes the geometric mean.
        places.setdefault((point.parameters, point.tokens), []).append(math.log(point.error))
    return [SizePoint(*size, math.exp(float(np.mean(logs)))) for size, logs in places.items()]


def fit(points: Sequence[SizePoint]) -> PowerLaw:
    """Return the power law of these points, with standard errors by Student's t.

    Raises:
        UserError: fewer than `FEWEST_SIZES` sizes, no more points than coefficients, sizes and
            tokens per parameter that vary together, or an error that is not positive.

    Example: points on N^-0.5, of 20 tokens per parameter each.
        >>> law = fit([SizePoint(size, 20 * size, size**-0.5) for size in (1e6, 4e6, 16e6)])
        >>> round(law.exponents["N"].value, 4), round(law.at(1e8), 6)
        (-0.5, 0.0001)
    """
    points = merged(points)
    sizes = {point.parameters for point in points}
    if len(sizes) < FEWEST_SIZES:
        raise UserError(
            f"{len(sizes)} of {FEWEST_SIZES} sizes that decide an exponent; give studies of more"
        )

    # log error = constant + exponents x centred logs; a quantity that all share has no exponent
    logs = {
        PARAMETERS: np.log([point.parameters for point in points]),
        PER_PARAMETER: np.log([point.tokens / point.parameters for point in points]),
    }
    means = {name: math.exp(values.mean()) for name, values in logs.items()}
    # Centred, so the constant is the log error at the geometric means, `scale` of the law.
    varied = {
        name: values - values.mean() for name, values in logs.items() if np.ptp(values) > SAME
    }
    # A column of ones, then a centred log for each quantity that varies.
    design = np.stack([np.ones(len(points)), *varied.values()], axis=1)

    # what the points cannot decide is refused
    degrees = len(points) - design.shape[1]
    if np.linalg.matrix_rank(design, tol=SAME) < design.shape[1]:
        raise UserError(
            "sizes and tokens per parameter vary together, so neither exponent is decided; add a"
            " study of another budget"
        )
    if degrees < 1:
        raise UserError(
            f"{len(points)} sizes and budgets decide no exponents of N and D/N with an error; add a"
            " study"
        )

    # least squares, and standard errors from the residuals
    target = np.log([point.error for point in points])
    coefficients, *_ = np.linalg.lstsq(design, target)
    # The covariance of the coefficients is variance x inverse(X'X).
    variance = float(((target - design @ coefficients) ** 2).sum()) / degrees
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    exponents = {
        name: Estimate(float(value), {SCATTER: ErrorSource(float(error), degrees)})
        for name, value, error in zip(varied, coefficients[1:], errors[1:], strict=True)
    }
    return PowerLaw(exponents, math.exp(coefficients[0]), means, len(points))


MILLION = 1e6
SIZE = Quantity("parameters without token embedding", "million", is_log=True)


def scaling(
    ends: Sequence[End], laws: Mapping[str, PowerLaw], specs: Sequence[str]
) -> Drawn | None:
    """Return a panel per figure and spec: every end, coloured by study, a marker per engine.

    Dashed is the fitted law at the mean tokens per parameter. `laws` are by column.
    """
    studies = list(dict.fromkeys(end["study"] for end in ends))
    looks = Runs("study", dict(zip(studies, looks_for(studies), strict=True)), field="study")
    columns = columns_of(len(specs))
    panels = []
    for measure in ERRORS:
        y = AXES[measure]
        for spec in specs:
            column = measure.of(spec)
            title = spec_title(spec)
            rows = [_row(end, column, title, y) for end in ends if _is_placed(end, column)]
            if rows:
                panels.append((rows, _panel(rows, looks, y, laws.get(column), columns)))
    return drawn(panels, columns)


def _is_placed(end: End, column: str) -> bool:
    return end.get("parameters") is not None and end.get(column) is not None


def _row(end: End, column: str, title: str, y: Quantity) -> dict[str, object]:
    facts = {name: end[name] for name in ("study", "label", "engine", "seed", "tokens")}
    interval = (end[f"{column}_low"], end[f"{column}_high"])
    values = SIZE.values(end["parameters"] / MILLION) | y.values(end[column], interval)
    return {"panel": title, **facts, **values}


def _panel(rows: Rows, looks: Runs, measure: Quantity, law: PowerLaw | None, columns: int) -> Chart:
    y = measure.logarithmic_for(rows)
    engines = sorted({row["engine"] for row in rows})
    scale = {"domain": engines, "range": SHAPES[: len(engines)]}
    shape = {"field": "engine", "type": "nominal", "title": "engine", "scale": scale}
    layers = [marks(rows, looks, SIZE, y, has_line=False, points={"shape": shape})]
    if law:
        sizes = sorted({row[SIZE.label] for row in rows})
        line = [SIZE.values(size) | y.values(law.at(size * MILLION)) for size in sizes]
        encoding = {"x": SIZE.encoding(), "y": y.encoding()}
        layers.append(data(line, mark={"type": "line", **DASHED}, encoding=encoding))
    return panel(layers, rows[0]["panel"], columns)


def write_comparison(studies: Mapping[Path, Study], out: Path) -> Iterator[str]:
    """Write ends.parquet and ends.csv, and scaling.csv, .png and .pdf; yield the laws, then files.

    Args:
        studies: by their directories.
        out: directory of the files.

    Raises:
        UserError: no study holds an end of training, or one has no table.
    """
    ends = [end for directory, study in studies.items() for end in ends_of(directory, study)]
    if not ends:
        raise UserError("no run of these studies is at its end yet; compare them when one is")
    out.mkdir(parents=True, exist_ok=True)
    write_ends(out / "ends.parquet", ends, list(studies.values()))
    write_rows(ends, out / "ends.csv")

    specs = _common(list(studies.values()))
    laws: dict[str, PowerLaw] = {}
    refused: dict[str, list[str]] = {}
    for spec in specs:
        for measure in ERRORS:
            column, title = measure.of(spec), f"{measure.title} ({spec_title(spec)})"
            try:
                laws[column] = fit_column(ends, column)
                yield from wrapped(f"{title} ~ {law_text(laws[column])}")
            except UserError as reason:
                refused.setdefault(str(reason), []).append(title)
    # A reason that all errors have is said once.
    for reason_words, titles in refused.items():
        what = enumeration(titles) if laws or len(refused) > 1 else "any error"
        yield from wrapped(f"no scaling law of {what}: {reason_words}")
    if not specs:
        yield "no scaling law: the studies share no quantization of every checkpoint"

    yield f"{out / 'ends.csv'}: {len(ends)} ends of training of {len(studies)} studies"
    drawn = scaling(ends, laws, specs)
    if drawn:
        write_figure(drawn, out / "scaling")
        yield f"{out / 'scaling.png'}: each error against the size"


def _common(studies: Sequence[Study]) -> list[str]:
    """Return the specs that every study quantizes every checkpoint with."""
    first, *others = (study.quantization.specs for study in studies)
    return [spec for spec in first if all(spec in specs for specs in others)]


def fit_column(ends: Sequence[End], column: str) -> PowerLaw:
    """Return the power law of a column; UserError as `fit`, or for ends of different texts."""
    needed = ("parameters", "tokens", column)
    measured_ends = [end for end in ends if all(end.get(key) is not None for key in needed)]
    # An error depends on the text it is measured on; a law over two texts would mix them.
    texts = {end.get("evaluation_sha256") for end in measured_ends}
    if len(texts) > 1:
        raise UserError(f"the ends are measured on {len(texts)} different texts; measure on one")
    return fit([SizePoint(end["parameters"], end["tokens"], end[column]) for end in measured_ends])


def law_text(law: PowerLaw) -> str:
    """Return 'N^-0.31 [-0.40, -0.22], (D/N)^0.2 [0.1, 0.3], over 6 sizes and budgets'."""
    parts = []
    for name, exponent in law.exponents.items():
        base = f"({name})" if "/" in name else name
        interval = exponent.interval(INTERVAL_LEVEL)
        parts.append(f"{base}^{with_interval(exponent.value, *interval)}")
    return f"{', '.join(parts)}, by least squares over {law.points} sizes and budgets"
