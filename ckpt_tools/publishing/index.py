"""index.csv of a published trajectory: a row per revision, a column per figure, empty where nothing was measured."""

import csv
from pathlib import Path
from typing import Any

from ckpt_tools.publishing.exports import Exported
from ckpt_tools.publishing.results import Quantization, Result
from train.run_directory import replaced_file

INDEX_CSV = "index.csv"
NATS = "nats_per_token"
CURVATURE_UNIT = f"{NATS}_per_squared_parameter"


def write_index(out: Path, exports: list[Exported], stage: int) -> None:
    """Writes OUT/index.csv whole or not at all. Column names end with the unit where a figure has one."""
    rows = [_row(one, stage) for one in exports]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns.sort(key=lambda column: column.rpartition("/")[0])  # figures of one measurement side by side
    with replaced_file(out / INDEX_CSV) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _row(one: Exported, stage: int) -> dict[str, Any]:
    quantized = [result.measured for result in one.results if isinstance(result.measured, Quantization)]
    row = {
        "revision": one.revision,
        "stage": stage,
        "step": one.step,
        "tokens": one.tokens,
        "average": one.average,
        "learning_rate": one.lineage.get("learning_rate"),
        f"train_loss_{NATS}": one.lineage.get("train_loss"),
        f"held_out_loss_{NATS}": one.lineage.get("held_out_loss"),
        f"cross_entropy_{NATS}": quantized[0].cross_entropy if quantized else None,  # the same text for all
        "weights_sha256": " ".join(one.weights.values()),
    }
    for result in one.results:
        row |= {f"{result.measurement}/{result.name}/{name}": value for name, value in _figures(result).items()}
    return row


def _figures(result: Result) -> dict[str, Any]:
    measured = result.measured
    if isinstance(measured, Quantization):
        (low, high), (kl_low, kl_high) = measured.intervals.relative_error, measured.intervals.kl_divergence
        return {
            "relative_error": measured.relative_error,
            "relative_error_low": low,
            "relative_error_high": high,
            f"kl_divergence_{NATS}": measured.kl_divergence,
            f"kl_divergence_low_{NATS}": kl_low,
            f"kl_divergence_high_{NATS}": kl_high,
        }
    top = measured.lambda_max
    return {
        f"trace_{CURVATURE_UNIT}": measured.trace.mean,
        f"trace_standard_error_{CURVATURE_UNIT}": measured.trace.standard_error,
        f"lambda_max_{CURVATURE_UNIT}": top.value if top else None,
        "lambda_max_relative_residual": top.residual if top else None,
        "lambda_max_converged": top.converged if top else None,
    }
