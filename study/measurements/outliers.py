"""Outlier statistics of inputs and weights of every linear, at every checkpoint."""

from collections.abc import Mapping

from base.outlier_names import KINDS, STATISTICS
from ckpt_tools.hf.measured import Outliers
from quant_eval.settings import LINEARS, OutlierRunSettings, OutlierSettings
from study.measurements.kind import (
    SHARE,
    Column,
    Kind,
    Reading,
    Subject,
    TabledResult,
    alone,
    estimated,
    options,
)
from study.paths import result
from study.step import Step

FOLDER = "outliers"
TITLES = {
    "kurtosis": "kurtosis",
    "max_to_mean": "max-to-mean ratio",
    "max_to_median": "max-to-median ratio",
    "top_channels": "share of the squared norm in 1% of channels",
}


def _columns(kind: str) -> dict[str, Column]:
    """Return the columns of inputs or weights, by statistic: means over linears."""
    return {
        statistic: Column(
            f"outliers/{kind}_{statistic}",
            f"{TITLES[statistic]} of {kind}s, mean over linears; _max: of the largest",
            SHARE if statistic == "top_channels" else "",
        )
        for statistic in STATISTICS
    }


INPUT, WEIGHT = map(_columns, KINDS)
COLUMNS = (*INPUT.values(), *WEIGHT.values())


def _steps(settings: OutlierSettings, subject: Subject, _: Mapping[str, list[Step]]) -> list[Step]:
    held_out = subject.texts["held_out"].prefix
    return [
        subject.step(
            "outliers",
            f"outliers-{subject.run}-{subject.name}",
            ("{launch}", "-m", "quant_eval", "outliers"),
            (result(subject.run, subject.model, FOLDER, LINEARS),),
            uses=("held_out",),
            models=(subject.hf,),
            tail=options(OutlierRunSettings, settings, data=held_out, device="{device}"),
            expected_seconds=1.0,
        )
    ]


def _readings(column: Column) -> list[Reading]:
    keys = ("figures", column.figure)
    largest = Reading(f"{column.name}_max", (*keys, "max"), column.unit)
    if column in WEIGHT.values():  # no sample, so without an error
        return [alone(column, column.name, *keys, "mean"), largest]
    return [*estimated(column, column.name, *keys), largest]


def _tabled(_: OutlierSettings) -> list[TabledResult]:
    readings = [reading for column in COLUMNS for reading in _readings(column)]
    return [TabledResult(FOLDER, LINEARS, Outliers, readings)]


OUTLIERS = Kind[OutlierSettings](
    "outliers", "all", _steps, _tabled, shares_work=True, every_seed=True
)
