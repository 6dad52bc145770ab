"""The figure of the error at the end of training against the size of the model."""

from collections.abc import Mapping, Sequence

from dynamics.across.ends import End
from dynamics.across.fit import PowerLaw
from dynamics.figures.quantization import MEASURES
from study.figures.charts import DASHED, Chart, Quantity, Rows, columns_of, data, marks, panel
from study.figures.figure import Drawn, drawn
from study.figures.looks import SHAPES, Runs, looks_for
from study.measurements.titles import spec_title

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
    for figure, y in MEASURES.items():
        for spec in specs:
            column = f"quant/{spec}/{figure}"
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
