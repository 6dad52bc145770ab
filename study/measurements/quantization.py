"""The losses of a quantized model: at every checkpoint, and by further methods at the last one."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from base.frozen import Frozen
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from quant_eval.methods import METHODS
from quant_eval.specs import parse_spec
from study.measurements.kind import (
    Kind,
    Reader,
    Subject,
    Type,
    Values,
)
from study.paths import MeasuredModel, quantization_result
from study.pipeline.step import Step

INTERVAL_FIGURES = (
    "cross_entropy",
    "cross_entropy_quantized",
    "absolute_error",
    "relative_error",
    "kl_divergence",
    "top1_agreement",
)
COUNT_FIGURES = ("tokens", "documents")
TEXTS = ("calibration", "held_out")


class QuantizationSettings(Frozen):
    """The quantization of every checkpoint, with its calibration and evaluation."""

    specs: tuple[str, ...] = Field(min_length=1)
    methods: tuple[str, ...] = Field(
        default=(), description="further specs, for the last checkpoint of each run only"
    )
    by_block: tuple[str, ...] = Field(
        default=(),
        description=(
            "specs measured block by block at the last checkpoint of each run, with the curvature"
            " along their steps; the first spans the slices"
        ),
    )
    calibration_sequences: int = Field(ge=1)
    eval_tokens: int = Field(ge=1, description="predicted tokens of each loss")
    block_tokens: int = Field(
        ge=1, description="the same block by block: with B blocks 2 B + 1 losses are measured"
    )
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of the full and the quantized model alike"
    )

    @property
    def at_the_end(self) -> tuple[str, ...]:
        """Every spec that the last checkpoint of a run is quantized with."""
        return (*self.specs, *self.methods)

    @model_validator(mode="after")
    def _canonical(self) -> Self:
        check_specs(self.at_the_end)
        check_specs(self.by_block)
        for spec in self.by_block:
            if parse_spec(spec).method == "int8":
                raise ValueError(
                    f"{spec} rounds activations too, it is no step of weights; leave it out of"
                    " by_block"
                )
        return self


def check_specs(specs: tuple[str, ...]) -> None:
    """Raise ValueError for a spec that is not in its canonical form, or that is listed twice."""
    for spec in specs:  # it names a directory and a column
        canonical = parse_spec(spec).name
        if spec != canonical:
            raise ValueError(f"write {canonical} instead of {spec}")
    if len(set(specs)) != len(specs):
        raise ValueError("a spec is listed twice")


def calibrated(settings: QuantizationSettings, subject: Subject) -> tuple[str, ...]:
    """Return the options of every quantization of the study."""
    return (
        *("--calibration", subject.texts["calibration"].prefix),
        *("--eval", subject.texts["held_out"].prefix),
        *("--calibration-sequences", str(settings.calibration_sequences)),
    )


def computed(settings: QuantizationSettings, tokens: int) -> tuple[str, ...]:
    """Return the options of every loss of the study."""
    return (
        *("--eval-tokens", str(tokens)),
        *("--dtype", settings.dtype, "--device", "{device}"),
    )


def launched(specs: tuple[str, ...]) -> tuple[str, ...]:
    """Return how a quantization starts: other projects' methods run in one process."""
    own = all(METHODS[parse_spec(spec).method].library == "quantdyn" for spec in specs)
    return ("{launch}" if own else "{python}", "-m", "quant_eval", "run")


def _steps(
    settings: QuantizationSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    return [
        _step(settings, subject, "quantize", f"{subject.run}-{subject.name}-{spec}", spec)
        for spec in settings.specs
    ]


def _method_steps(
    settings: QuantizationSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    return [
        _step(settings, subject, "methods", f"{subject.run}-{spec}", spec)
        for spec in settings.methods
    ]


def _step(
    settings: QuantizationSettings, subject: Subject, kind: str, name: str, spec: str
) -> Step:
    # further methods are of several projects and share a process: no ranks
    is_method = kind == "methods"
    return subject.step(
        kind,
        f"{kind}-{name}",
        ("{python}", "-m", "quant_eval", "run") if is_method else launched((spec,)),
        (quantization_result(subject.run, subject.model, spec),),
        uses=TEXTS,
        models=(subject.hf,),
        specs=("--spec", spec),
        tail=calibrated(settings, subject) + computed(settings, settings.eval_tokens),
        expected_seconds=12.0 if is_method else 4.0,
    )


def quantization_columns(specs: tuple[str, ...]) -> dict[str, Type]:
    """Return the columns of quantizations; `_low` and `_high` bound the figure before them."""
    columns: dict[str, Type] = {}
    for spec in specs:
        for figure in INTERVAL_FIGURES:
            for bound in ("", "_low", "_high"):
                columns[f"quant/{spec}/{figure}{bound}"] = "number"
        columns |= {f"quant/{spec}/{figure}": "count" for figure in COUNT_FIGURES}
    return columns


def _values(path: Path, spec: str) -> Values:
    measured, values = read_result(path, Quantization).measured, Values()
    for figure in INTERVAL_FIGURES:
        low, high = measured.intervals.get(figure, (None, None))
        values |= {figure: getattr(measured, figure), f"{figure}_low": low, f"{figure}_high": high}
    values |= {figure: getattr(measured, figure) for figure in COUNT_FIGURES}
    return {f"quant/{spec}/{figure}": value for figure, value in values.items()}


def _results(specs: tuple[str, ...], run: str, model: MeasuredModel) -> dict[str, Reader]:
    return {quantization_result(run, model, spec): partial(_values, spec=spec) for spec in specs}


QUANTIZE = Kind[QuantizationSettings](
    "quantize",
    "all",
    _steps,
    lambda settings, run, model: _results(settings.specs, run, model),
    lambda settings: quantization_columns(settings.specs),
    shares_work=True,
)
METHODS_AT_THE_END = Kind[QuantizationSettings](
    "methods",
    "last",
    _method_steps,
    lambda settings, run, model: _results(settings.methods, run, model),
    lambda settings: quantization_columns(settings.methods),
)
