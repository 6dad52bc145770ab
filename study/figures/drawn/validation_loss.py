"""Held-out loss along training."""

from dataclasses import replace

from study.figures.canvas import Canvas, late
from study.figures.charts import LINE, NATS, Quantity, Rows, around, data, grid, marks
from study.figures.figure import Drawn, figure
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

LOSS = Quantity("held-out loss", NATS)
FIRST_SHARE = 0.08  # of training, whose losses are far above the others
NEAR = 0.06


@figure(
    "validation_loss",
    40,
    "Held-out loss in full precision against training tokens; markers are checkpoints.",
    lambda study: bool(study.trained),
)
def validation_loss(canvas: Canvas) -> Drawn | None:
    """Draw the losses of metrics.jsonl, and those of the checkpoints."""
    during = _during_training(canvas)
    saved = canvas.along(LOSS, "held_out_loss", None, "", series="checkpoint")
    rows = [*during, *saved]
    if not rows:
        return None
    values = late(rows, canvas.tokens, LOSS, FIRST_SHARE * canvas.most_tokens / canvas.unit)
    y = replace(LOSS, domain=around(values, NEAR)) if values else LOSS
    axes = {"x": canvas.tokens.encoding(), "y": y.encoding(), "color": canvas.runs.colour}
    curve = data(during, mark=LINE | {"strokeWidth": 1.2}, encoding=axes)
    points = marks(saved, canvas.runs, canvas.tokens, y, has_line=False)
    return Drawn([*rows, *canvas.rates], grid([canvas.panel([curve, points], "", 1)], 1))


def _during_training(canvas: Canvas) -> Rows:
    rows = []
    for run in canvas.study.trained:
        head = {"panel": "", "run": canvas.runs.looks[run.name].label, "series": "during training"}
        for row in read_metrics(RunDirectory(canvas.directory / run.name).metrics):
            if "held_out_loss" in row:
                values = canvas.tokens.values(row["tokens"] / canvas.unit)
                values |= LOSS.values(row["held_out_loss"])
                rows.append(head | {"step": row["step"], "tokens": row["tokens"]} | values)
    return rows
