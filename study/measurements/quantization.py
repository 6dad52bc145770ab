"""The losses of a quantized model at every checkpoint.

At the last one of each run also by further methods, and block by block.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from base.frozen import Frozen, field_of
from ckpt_tools.hf.measured import Quantization
from quant_eval.methods import METHODS
from quant_eval.settings import Bos, RunSettings
from quant_eval.specs import parse_spec
from study.measurements.kind import Column, Kind, Result, Subject, bounded
from study.paths import quantization_result, result
from study.pipeline.step import Step, python

FIGURES = (
    "cross_entropy",
    "cross_entropy_quantized",
    "absolute_error",
    "relative_error",
    "kl_divergence",
    "top1_agreement",
)
COUNTS = ("tokens", "documents")


class QuantizationSettings(Frozen):
    """The quantization of every checkpoint, with its calibration and evaluation."""

    specs: tuple[str, ...] = Field(min_length=1)
    along: tuple[str, ...] = Field(
        default=(), description="further specs, for every checkpoint, shown among the methods"
    )
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
    calibration_draws: int = Field(
        default=3,
        ge=1,
        description=(
            "draws of the calibration text, each quantized and measured; one block by block, and of"
            " specs that read none"
        ),
    )
    eval_tokens: int = Field(ge=1, description="predicted tokens of each loss")
    block_tokens: int = Field(
        ge=1, description="the same block by block: with B blocks 2 B + 1 losses are measured"
    )
    dtype: Literal["fp32", "bf16"] = field_of(RunSettings, "dtype")
    bos: Bos = field_of(RunSettings, "bos")

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

    @model_validator(mode="after")
    def _canonical(self) -> Self:
        check_specs(self.at_the_end)
        check_specs(self.by_block)
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


def calibration_options(
    specs: Iterable[str], settings: QuantizationSettings, subject: Subject
) -> tuple[str, ...]:
    """Return the options that name the calibration text, for a process that measures these specs.

    Those that need none do not read it: they share the process, and its pass through the full
    model, with those that do.
    """
    if not is_calibrated(specs):
        return ()
    sequences = str(settings.calibration_sequences)
    prefix = subject.texts["calibration"].prefix
    return ("--calibration", prefix, "--calibration-sequences", sequences)


def _uses(specs: Iterable[str]) -> tuple[str, ...]:
    return ("calibration", "held_out") if is_calibrated(specs) else ("held_out",)


def _options(
    specs: tuple[str, ...], settings: QuantizationSettings, subject: Subject, tokens: int
) -> tuple[str, ...]:
    """Return the options of losses on so many tokens."""
    return (
        *calibration_options(specs, settings, subject),
        *("--eval", subject.texts["held_out"].prefix),
        *("--eval-tokens", str(tokens)),
        *computing_options(settings),
    )


def computing_options(settings: QuantizationSettings) -> tuple[str, ...]:
    """Return the options that losses and tasks share."""
    is_said = settings.bos != RunSettings.model_fields["bos"].default
    bos = ("--bos", settings.bos) if is_said else ()
    return ("--dtype", settings.dtype, *bos, "--device", "{device}")


def draw_options(specs: Iterable[str], settings: QuantizationSettings) -> tuple[str, ...]:
    """Return the option that draws the calibration text several times; none where no spec reads it.

    Of specs that share a process it holds for those that are calibrated.
    """
    unsaid = RunSettings.model_fields["calibration_seeds"].default
    several = settings.calibration_draws != unsaid and is_calibrated(specs)
    return ("--calibration-seeds", str(settings.calibration_draws)) if several else ()


def _launched(specs: tuple[str, ...]) -> tuple[str, ...]:
    """Return how a quantization starts: other projects' methods run in one process."""
    own = all(METHODS[parse_spec(spec).method].library == "quantdyn" for spec in specs)
    return ("{launch}" if own else "{python}", "-m", "quant_eval", "run")


def _steps(
    kind: str, specs: tuple[str, ...], settings: QuantizationSettings, subject: Subject
) -> list[Step]:
    # further methods are of several projects and share a process: no ranks
    is_method = kind == "methods"
    model = subject.run if is_method else f"{subject.run}-{subject.name}"
    return [
        subject.step(
            kind,
            f"{kind}-{model}-{spec}",
            python("quant_eval", "run") if is_method else _launched((spec,)),
            (quantization_result(subject.run, subject.model, spec),),
            uses=_uses((spec,)),
            models=(subject.hf,),
            specs=("--spec", spec),
            tail=(
                *_options(specs, settings, subject, settings.eval_tokens),
                *draw_options(specs, settings),
            ),
            expected_seconds=12.0 if is_method else 4.0,
        )
        for spec in specs
    ]


def _block_steps(
    settings: QuantizationSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    specs = settings.by_block
    results = tuple(result(subject.run, subject.model, "blocks", spec) for spec in specs)
    command = (
        *_launched(specs),
        subject.hf,
        *(word for spec in specs for word in ("--spec", spec)),
        *_options(specs, settings, subject, settings.block_tokens),
        *("--per-block", "--dense"),
        *(word for path in results for word in ("--out", f"{{study}}/{Path(path).parent}")),
    )
    seconds = 5.0 + 6.0 * len(specs)
    name = f"blocks-{subject.run}"
    return [
        subject.step("blocks", name, command, results, uses=_uses(specs), expected_seconds=seconds)
    ]


def _of_figure(name: str, figure: str) -> list[Column]:
    """Return the columns of a figure: value, interval, and standard errors by source."""
    errors = [
        Column(f"{name}/{figure}_se_{source}", ("standard_errors", figure, source))
        for source in ("documents", "draws")
    ]
    return [*bounded(f"{name}/{figure}", figure), *errors]


def _tabled(specs: tuple[str, ...]) -> list[Result]:
    results = []
    for spec in specs:
        name = f"quant/{spec}"
        columns = [
            *(column for figure in FIGURES for column in _of_figure(name, figure)),
            *(Column(f"{name}/{count}", (count,), "count") for count in COUNTS),
        ]
        results.append(Result("quant", spec, Quantization, columns))
    return results


QUANTIZE = Kind[QuantizationSettings](
    "quantize",
    "all",
    lambda settings, subject, _: _steps("quantize", settings.everywhere, settings, subject),
    lambda settings: _tabled(settings.everywhere),
    shares_work=True,
)
METHODS_AT_THE_END = Kind[QuantizationSettings](
    "methods",
    "last",
    lambda settings, subject, _: _steps("methods", settings.methods, settings, subject),
    lambda settings: _tabled(settings.methods),
)
BLOCKS = Kind[QuantizationSettings]("blocks", "last", _block_steps, shares_work=True)
