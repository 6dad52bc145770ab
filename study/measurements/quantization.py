"""The losses of a quantized model at every checkpoint.

At the last one of each run also by further methods, and block by block.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from ckpt_tools.hf.measured import Quantization
from quant_eval.settings import LossSettings, RunSettings, check_calibration
from quant_eval.specs import parse_spec
from study.measurements.kind import (
    NATS,
    SHARE,
    Column,
    Kind,
    Reading,
    Subject,
    TabledResult,
    alone,
    bounded,
    options,
)
from study.paths import quantization_result, result
from study.step import Step, python

CROSS_ENTROPY = Column("quant/{spec}/cross_entropy", "loss", NATS, "lower")
QUANTIZED_LOSS = Column("quant/{spec}/cross_entropy_quantized", "quantized loss", NATS, "lower")
LOSS_INCREASE = Column("quant/{spec}/absolute_error", "loss increase", NATS, "lower")
RELATIVE_ERROR = Column("quant/{spec}/relative_error", "relative error", SHARE, "lower")
DIVERGENCE = Column("quant/{spec}/kl_divergence", "KL divergence", NATS, "lower")
AGREEMENT = Column(
    "quant/{spec}/top1_agreement",
    "share of tokens with the same most likely token",
    SHARE,
    "higher",
)
R_L = Column("quant/{spec}/r_l", "R_L: relative change of the last block's output", SHARE, "lower")
PERPLEXITY = Column("quant/{spec}/perplexity", "perplexity", better="lower")
QUANTIZED_PERPLEXITY = Column(
    "quant/{spec}/perplexity_quantized", "quantized perplexity", better="lower"
)
# Each is exp of a loss, and so are the ends of its interval.
PERPLEXITIES = {PERPLEXITY: CROSS_ENTROPY, QUANTIZED_PERPLEXITY: QUANTIZED_LOSS}
TOKENS = Column("quant/{spec}/tokens", "predicted tokens", "tokens", type="count")
DOCUMENTS = Column("quant/{spec}/documents", "documents", type="count")
FIGURES = (
    *(CROSS_ENTROPY, QUANTIZED_LOSS, LOSS_INCREASE),
    *(RELATIVE_ERROR, DIVERGENCE, AGREEMENT),
)
COLUMNS = (*FIGURES, R_L, *PERPLEXITIES, TOKENS, DOCUMENTS)
# The measures of what quantization costs, the one of less noise first.
ERRORS = (DIVERGENCE, RELATIVE_ERROR)
# What a study may show first, by the name in its settings.
MEASURES = {each.figure: each for each in (*ERRORS, LOSS_INCREASE)}


class QuantizationSettings(LossSettings):
    """The specs that checkpoints are quantized with, and the settings of their losses."""

    specs: tuple[str, ...] = Field(min_length=1, description="for every checkpoint")
    along: tuple[str, ...] = Field(
        default=(), description="further specs, for every checkpoint, shown among the methods"
    )
    methods: tuple[str, ...] = Field(
        default=(), description="further specs, for the last checkpoint of each run only"
    )
    measure: Literal["kl_divergence", "relative_error", "absolute_error"] = Field(
        default="kl_divergence",
        description=(
            "error that figures, tables and sentences show first; arXiv:2510.06213 has"
            " relative_error, its workshop version absolute_error; claims are judged by their own"
        ),
    )
    by_block: tuple[str, ...] = Field(
        default=(),
        description=(
            "specs measured block by block at the last checkpoint of each run, with the curvature"
            " along their steps (`step`); the first spans the slices (`slice`)"
        ),
    )
    eval_tokens: int = Field(ge=1, description="predicted tokens of each loss")
    block_tokens: int = Field(
        ge=1,
        description=(
            "the same block by block, of one calibration draw: with B blocks 2 B + 1 losses are"
            " measured"
        ),
    )

    @property
    def everywhere(self) -> tuple[str, ...]:
        """Every spec that all checkpoints are quantized with."""
        return (*self.specs, *self.along)

    @property
    def at_the_end(self) -> tuple[str, ...]:
        """Every spec that the last checkpoint of a run is quantized with."""
        return (*self.specs, *self.further)

    @property
    def further(self) -> tuple[str, ...]:
        """Those of them that are compared with the first."""
        return (*self.along, *self.methods)

    @property
    def measures(self) -> tuple[Column, ...]:
        """The errors that figures and tables show, the chosen one first."""
        return tuple(dict.fromkeys((MEASURES[self.measure], *ERRORS)))

    @model_validator(mode="after")
    def _canonical(self) -> Self:
        check_specs(self.at_the_end)
        check_specs(self.by_block)
        specs = map(parse_spec, (*self.at_the_end, *self.by_block))
        check_calibration([spec for spec in specs if spec.needs_calibration], self)
        for spec in self.by_block:
            if parse_spec(spec).casts:
                raise ValueError(
                    f"{spec} rounds activations too, it is not a step of weights; leave it out of"
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


def is_calibrated(specs: Iterable[str]) -> bool:
    """Return whether any of these specs needs the calibration text."""
    return any(parse_spec(spec).needs_calibration for spec in specs)


def quantizing_options(
    command: type[BaseModel],
    settings: BaseModel,
    specs: Iterable[str],
    calibration: str,
    **decided: Any,
) -> tuple[str, ...]:
    """Return the options of a process that quantizes with these specs.

    Specs that need no calibration do not read its text: they share the process, and its pass
    through the full model, with those that do.
    """
    text = calibration if is_calibrated(specs) else None
    return options(command, settings, calibration=text, device="{device}", **decided)


def _uses(specs: Iterable[str]) -> tuple[str, ...]:
    return ("calibration", "held_out") if is_calibrated(specs) else ("held_out",)


def _options(
    specs: tuple[str, ...], settings: QuantizationSettings, subject: Subject, **decided: Any
) -> tuple[str, ...]:
    calibration, held_out = subject.texts["calibration"].prefix, subject.texts["held_out"].prefix
    return quantizing_options(RunSettings, settings, specs, calibration, eval=held_out, **decided)


def _launched(specs: tuple[str, ...]) -> tuple[str, ...]:
    """Return how a quantization starts: other projects' methods run in one process."""
    # Only methods of this project share their work among processes.
    own = all(parse_spec(spec).library == "quantdyn" for spec in specs)
    return ("{launch}" if own else "{python}", "-m", "quant_eval", "run")


def _steps(
    kind: str, specs: tuple[str, ...], settings: QuantizationSettings, subject: Subject
) -> list[Step]:
    # further methods are of several projects and share a process: no ranks
    is_method = kind == "methods"
    model = subject.run if is_method else f"{subject.run}-{subject.name}"
    tail = _options(specs, settings, subject)  # once: a study has thousands of steps
    return [
        subject.step(
            kind,
            f"{kind}-{model}-{spec}",
            python("quant_eval", "run") if is_method else _launched((spec,)),
            (quantization_result(subject.run, subject.model, spec),),
            uses=_uses((spec,)),
            models=(subject.hf,),
            specs=("--spec", spec),
            tail=tail,
            expected_seconds=1.0 if is_method else 2.0,
        )
        for spec in specs
    ]


def _block_steps(
    settings: QuantizationSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    specs = settings.by_block
    results = tuple(result(subject.run, subject.model, "blocks", spec) for spec in specs)
    # 2 B + 1 losses a spec are costly, so they are of fewer tokens and of one draw.
    one_draw = {"eval_tokens": settings.block_tokens, "calibration_seeds": 1}
    of_blocks = settings.model_copy(update=one_draw)
    command = (
        *_launched(specs),
        subject.hf,
        *(word for spec in specs for word in ("--spec", spec)),
        *_options(specs, of_blocks, subject, per_block=True, dense=True),
        *(word for path in results for word in ("--out", f"{{study}}/{Path(path).parent}")),
    )
    seconds = 1.5 + len(specs)
    name = f"blocks-{subject.run}"
    return [
        subject.step("blocks", name, command, results, uses=_uses(specs), expected_seconds=seconds)
    ]


def dense_step(kind: str, spec: str, settings: QuantizationSettings, subject: Subject) -> Step:
    """Return the step that keeps a model's weights as a spec rounds them, by one draw.

    Its result is at RUN/hf/MODEL/dense/SPEC/result.json.
    """
    path = result(subject.run, subject.model, "dense", spec)
    # The loss comes along; that of few tokens is enough.
    few = {"eval_tokens": settings.block_tokens, "calibration_seeds": 1}
    chosen = _options((spec,), settings.model_copy(update=few), subject, dense=True)
    out = ("--out", f"{{study}}/{Path(path).parent}")
    return subject.step(
        kind,
        f"dense-{subject.run}-{subject.name}-{spec}",
        (*_launched((spec,)), subject.hf),
        (path,),
        uses=_uses((spec,)),
        specs=("--spec", spec),
        tail=(*chosen, *out),
    )


def _of_figure(figure: Column, spec: str) -> list[Reading]:
    """Return what the table has of a figure: value, interval, and standard errors by source."""
    name = figure.of(spec)
    errors = [
        Reading(f"{name}_se_{source}", ("standard_errors", figure.figure, source))
        for source in ("documents", "draws")
    ]
    return [*bounded(figure, name), *errors]


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:  # of a model that is beyond all use
        return math.inf


def _tabled(specs: tuple[str, ...]) -> list[TabledResult]:
    results = []
    for spec in specs:
        readings = [reading for figure in (*FIGURES, R_L) for reading in _of_figure(figure, spec)]
        for perplexity, loss in PERPLEXITIES.items():
            ends = bounded(loss, perplexity.of(spec))
            readings += [end._replace(unit=perplexity.unit, function=_exp) for end in ends]
        readings += [alone(count, count.of(spec), count.figure) for count in (TOKENS, DOCUMENTS)]
        results.append(TabledResult("quant", spec, Quantization, readings))
    return results


QUANTIZE = Kind[QuantizationSettings](
    "quantize",
    "all",
    lambda settings, subject, _: _steps("quantize", settings.everywhere, settings, subject),
    lambda settings: _tabled(settings.everywhere),
    shares_work=True,
    every_seed=True,
)
METHODS_AT_THE_END = Kind[QuantizationSettings](
    "methods",
    "last",
    lambda settings, subject, _: _steps("methods", settings.methods, settings, subject),
    lambda settings: _tabled(settings.methods),
    every_seed=True,
)
BLOCKS = Kind[QuantizationSettings]("blocks", "last", _block_steps, shares_work=True)
