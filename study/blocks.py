"""What each decoder block adds to the cost of quantization, from results that were measured with --per-block."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ckpt_tools.hf_directory import RESULT_JSON
from study.canvas import NEUTRAL, Canvas, Look, legend_of, looks_for
from study.drawing import drawn, save
from study.layout import blocks_result
from study.plots import POWER_2, Axis, Line, Mark, Panel, Plot, Point, Series, ends, logarithmic
from study.settings import spec_title
from train.command import UserError
from train.run_directory import replaced_file

INCREASE = "absolute_error"
MANY_BLOCKS = 12  # from here on marks are small
SPREAD = 0.36  # of the room between two blocks that the marks of one take up
NO_SHARE = "no clear increase"
TITLES = ("one block quantized", "all blocks but one quantized", "linears of the block")
NORM, QUANTIZED = "\u2016", "\u0174"
OUTPUT_ERROR = f"output error {NORM}(W - {QUANTIZED}) X{NORM}{POWER_2} / {NORM}W X{NORM}{POWER_2}"
LABELS = (
    "loss increase / that of the whole model",
    "1 - loss increase / that of the whole model",
    "relative output error of the linears",
)


class Increase(BaseModel):
    """How much a model with some blocks quantized loses, in nats per token."""

    absolute_error: float
    intervals: dict[str, tuple[float, float]]


class Block(BaseModel):
    """A block quantized alone, and all blocks but it."""

    block: int
    alone: Increase
    all_but_it: Increase


class Layer(BaseModel):
    """A linear; its error has no meaning, and is null, where a method moved scales between linears."""

    name: str
    relative_output_error: float | None


class Measured(Increase):
    """The whole model, its blocks and its linears."""

    blocks: list[Block] = Field(default=[], description="without --per-block there are none")
    layers: list[Layer]


class Model(BaseModel):
    """Which model."""

    path: Path


class Spec(BaseModel):
    """How it was quantized."""

    name: str


class BlockResult(BaseModel):
    """What the figure reads of a result.json."""

    model: Model
    spec: Spec
    measured: Measured

    @property
    def label(self) -> str:
        """Run and step of RUN/hf/STEP, or the last two parts of any other path."""
        return "/".join([part for part in self.model.path.parts if part != "hf"][-2:])


Share = tuple[float, float, float]  # of the loss increase: the value, then its interval


def read_block_result(path: Path) -> BlockResult:
    """A result.json or its directory; UserError where it is none, or was measured without --per-block."""
    file = path / RESULT_JSON if path.is_dir() else path
    try:
        result = BlockResult.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; give a result.json of 'python -m quant_eval run'") from None
    except ValidationError:
        raise UserError(
            f"{file} is no result of a quantization; measure again with 'python -m quant_eval run'"
        ) from None
    if not result.measured.blocks:
        raise UserError(f"{file} holds no blocks; measure again with 'python -m quant_eval run ... --per-block'")
    return result


def shares(measured: Measured) -> tuple[list[Share], list[Share]] | None:
    """Per block: increase with it alone / increase of the whole model, and 1 - increase without it / the same.

    The two differ by what blocks do to each other. Intervals are those of the numerators, with the whole model's
    increase taken as known. None where the interval of that increase reaches 0: then nothing is there to share.
    """
    total = measured.absolute_error
    if measured.intervals[INCREASE][0] <= 0:
        return None
    alone, needed = [], []
    for block in measured.blocks:
        low, high = block.alone.intervals[INCREASE]
        alone.append((block.alone.absolute_error / total, low / total, high / total))
        low, high = block.all_but_it.intervals[INCREASE]
        needed.append((1 - block.all_but_it.absolute_error / total, 1 - high / total, 1 - low / total))
    return alone, needed


def output_errors(measured: Measured) -> dict[int, list[float]]:
    """Block -> the relative output errors of its linears; the block is the first number in a linear's name."""
    errors: dict[int, list[float]] = defaultdict(list)
    for layer in measured.layers:
        found = re.search(r"(?<=\.)\d+(?=\.)", layer.name)
        if found and layer.relative_output_error is not None:
            errors[int(found[0])].append(layer.relative_output_error)
    return dict(sorted(errors.items()))


def blocks_plot(heading: str, results: Sequence[tuple[Look, BlockResult]]) -> Plot:
    """Shares of the loss increase block by block, and the output errors of the linears; a line per result."""
    deepest = max((len(result.measured.blocks) for _, result in results), default=1)
    panels_of: list[list[Series]] = [[], [], []]
    looks = []
    for index, (look, result) in enumerate(results):
        offset = SPREAD * (index / (len(results) - 1) - 0.5) if len(results) > 1 and deepest < MANY_BLOCKS else 0.0
        found = shares(result.measured)
        looks.append(look if found else Look(f"{look.label} ({NO_SHARE})", look.colour, look.marker))
        errors = output_errors(result.measured)
        means = [(sum(values) / len(values), min(values), max(values)) for values in errors.values()]
        blocks = [block.block for block in result.measured.blocks]
        lines = [(panels_of[2], list(errors), means)]
        lines += [(one, blocks, values) for one, values in zip(panels_of[:2], found, strict=True)] if found else []
        mark = replace(look.mark, size=2.6, width=1, has_band=True) if deepest >= MANY_BLOCKS else look.mark
        for series, places, values in lines:
            series.append(Series(mark, _points(places, values, offset), look.label))
    specs = {result.spec.name for _, result in results}
    above = f"{spec_title(*specs)}\n" if len(specs) == 1 else ""
    equal = tuple(
        Line(1 / depth, kind="dashed") for depth in sorted({len(result.measured.blocks) for _, result in results})
    )
    x = Axis(title="decoder block", is_place=True, is_integer=True, limits=(-0.6, deepest - 0.4))
    panels = []
    for series, title, label in zip(panels_of, TITLES, LABELS, strict=True):
        one: Any = {"x": x, "series": tuple(series), "title": above + title}
        if label == LABELS[-1]:
            reach = ends([point for line in series for point in line.points], "y")
            panels.append(Panel(y=logarithmic(Axis(title=label, written=OUTPUT_ERROR), reach), **one))
            continue
        y = Axis(title=label, is_percent=True, holds_zero=True)
        note = "" if series else "no loss increase told from 0"
        panels.append(Panel(y=y, lines=(Line(0.0), *equal), note=note, **one))
    keys = {"equal shares": Mark(colour=NEUTRAL, line="--", width=1)}
    return Plot(heading=heading, looks=legend_of(looks), panels=tuple(panels), keys=keys)


def _points(blocks: Sequence[int], values: Sequence[Share], offset: float) -> tuple[Point, ...]:
    return tuple(
        Point(x=block + offset, y=value, y_interval=(low, high), facts={"block": block})
        for block, (value, low, high) in zip(blocks, values, strict=True)
    )


def study_blocks_plot(canvas: Canvas, directory: Path) -> Plot:
    """The last checkpoints of a study block by block, a line per run."""
    study = canvas.study
    spec, runs = study.quantization.by_block[0], {run.name: run for run in study.runs}
    paths = {name: directory / blocks_result(runs[name], spec) for name in canvas.looks}
    results = [(look, read_block_result(paths[run])) for run, look in canvas.looks.items() if paths[run].exists()]
    return blocks_plot(study.heading, results)


def draw_results(paths: Sequence[Path], out: Path) -> None:
    """The figure of results from anywhere, in the order given."""
    if out.is_dir():
        raise UserError(f"{out} is a directory; give --out a PNG file")
    results = [read_block_result(path) for path in paths]
    labels = [result.label for result in results]
    if len({result.spec.name for result in results}) > 1 or len(set(labels)) < len(labels):
        labels = [f"{label} {result.spec.name}" for label, result in zip(labels, results, strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(out) as aside:
        save(drawn(blocks_plot("model", list(zip(looks_for(labels), results, strict=True)))), aside)
