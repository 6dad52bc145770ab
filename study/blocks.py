"""What each decoder block adds to the cost of quantization, from results that were measured with --per-block."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter
from pydantic import BaseModel, Field, ValidationError

from ckpt_tools.hf_directory import RESULT_JSON
from study.canvas import SMALL_MARKER, STYLE, Look, legend_above, logarithmic, looks_for, panels_of, save
from study.settings import spec_title
from train.command import UserError
from train.run_directory import replaced_file

INCREASE = "absolute_error"
MANY_BLOCKS = 12  # from here on marks are small
SPREAD = 0.36  # of the room between two blocks that the marks of one take up
EQUAL: Any = {"color": "#555555", "linestyle": "--", "linewidth": 1}
NO_SHARE = "no clear increase"


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


def draw_blocks(heading: str, results: Sequence[tuple[Look, BlockResult]], path: Path) -> None:
    """Shares of the loss increase block by block, and the output errors of the linears; a line per result."""
    figure, axes = panels_of(3)
    depths = {len(result.measured.blocks) for _, result in results}
    deepest, looks = max(depths, default=1), []
    for index, (look, result) in enumerate(results):
        offset = SPREAD * (index / (len(results) - 1) - 0.5) if len(results) > 1 and deepest < MANY_BLOCKS else 0.0
        found = shares(result.measured)
        looks.append(look if found else Look(f"{look.label} ({NO_SHARE})", look.colour, look.marker))
        errors = output_errors(result.measured)
        means = [(sum(values) / len(values), min(values), max(values)) for values in errors.values()]
        blocks = [block.block for block in result.measured.blocks]
        drawn = [(axes[2], list(errors), means)]
        drawn += [(axis, blocks, values) for axis, values in zip(axes[:2], found, strict=True)] if found else []
        for axis, places, values in drawn:
            _line(axis, [place + offset for place in places], values, look, deepest >= MANY_BLOCKS)
    specs = {result.spec.name for _, result in results}
    shared = f"{spec_title(*specs)}\n" if len(specs) == 1 else ""
    titles = ("one block quantized", "all blocks but one quantized", "linears of the block")
    labels = (
        "loss increase / that of the whole model",
        "1 - loss increase / that of the whole model",
        r"output error $\Vert(W - \hat{W})\,X\Vert^2\,/\,\Vert W X\Vert^2$",
    )
    for axis, title, label in zip(axes, titles, labels, strict=True):
        axis.set_title(shared + title)
        axis.set_xlabel("decoder block")
        axis.set_ylabel(label)
        axis.set_xlim(-0.6, deepest - 0.4)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[:2]:
        if not axis.has_data():
            axis.text(0.5, 0.5, "no loss increase told from 0", transform=axis.transAxes, ha="center", color="#777777")
        axis.axhline(0, color="#999999", linewidth=0.8, zorder=0)
        for depth in depths:
            axis.axhline(1 / depth, **EQUAL, zorder=1)
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None if deepest < MANY_BLOCKS else 1))
    if axes[2].has_data():
        logarithmic(axes[2], "y")
    legend_above(figure, heading, looks, [Line2D([], [], **EQUAL, label="equal shares")])
    save(figure, path)


def _line(axis: Axes, places: list[float], values: Sequence[Share], look: Look, is_dense: bool) -> None:
    """A line with a bar at every block, or with a band where there is no room for bars."""
    middle, low, high = (list(column) for column in zip(*values, strict=True)) if values else ([], [], [])
    if is_dense:
        axis.plot(places, middle, look.marker, color=look.colour, linestyle="-", markersize=SMALL_MARKER, linewidth=1)
        axis.fill_between(places, low, high, color=look.colour, alpha=0.13, linewidth=0)
        return
    bars = [[a - b for a, b in zip(middle, low, strict=True)], [b - a for a, b in zip(middle, high, strict=True)]]
    axis.errorbar(places, middle, yerr=bars, color=look.colour, marker=look.marker, elinewidth=0.9, capsize=2)


def draw_results(paths: Sequence[Path], out: Path) -> None:
    """The figure of results from anywhere, in the order given."""
    if out.is_dir():
        raise UserError(f"{out} is a directory; give --out a PNG file")
    results = [read_block_result(path) for path in paths]
    labels = [result.label for result in results]
    if len({result.spec.name for result in results}) > 1 or len(set(labels)) < len(labels):
        labels = [f"{label} {result.spec.name}" for label, result in zip(labels, results, strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE), replaced_file(out) as aside:
        draw_blocks("model", list(zip(looks_for(labels), results, strict=True)), aside)
