"""Held-out loss along training."""

from study.figures.canvas import Canvas
from study.figures.charts import LINE, NATS, Quantity, Rows, data, marks
from study.figures.figure import Drawn, drawn, figure
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

LOSS = Quantity("held-out loss", NATS)
FIRST_SHARE = 0.08  # of training, whose losses are far above the others


@figure(
    "validation_loss",
    40,
    "Held-out loss in full precision against training tokens; markers are checkpoints.",
    lambda study: bool(study.trained),
)
def validation_loss(canvas: Canvas) -> Drawn | None:
    """Draw the losses of metrics.jsonl, and those of the checkpoints."""
    during = _during_training(canvas)
    saved = canvas.along(LOSS, "held_out_loss", "", series="checkpoint")
    first = FIRST_SHARE * canvas.most_tokens
    y = LOSS.near([row for row in (*during, *saved) if row["tokens"] >= first])
    axes = {"x": canvas.tokens.encoding(), "y": y.encoding(), "color": canvas.runs.colour}
    curve = data(during, mark=LINE | {"strokeWidth": 1.2}, encoding=axes)
    points = marks(saved, canvas.runs, canvas.tokens, y, has_line=False)
    return drawn([([*during, *saved], canvas.panel([curve, points], "", 1))], 1, canvas.rates)


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
