"""The learning rates of runs before they are trained: a table of each, and one picture of all."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from train.command import UserError
from train.config import RunConfig
from train.run_directory import replaced_file
from train.schedules import corner_steps, first_step, learning_rate, phase_at

POINTS_BETWEEN = 3  # rows of the table between two corners
POINTS_OF_CURVE = 400
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", ":")
DOT: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4, "clip_on": False}


def table_steps(config: RunConfig) -> list[int]:
    """The corners of a schedule and up to three steps between two of them: saved ones where there are any."""
    corners = corner_steps(config)
    steps = set(corners)
    for start, stop in itertools.pairwise(corners):
        between = [step for step in config.save_steps if start < step < stop] or range(start + 1, stop)
        count = min(POINTS_BETWEEN, len(between))
        steps |= {between[len(between) * (index + 1) // (count + 1)] for index in range(count)}
    return sorted(steps)


def schedule_table(config: RunConfig) -> Table:
    """Step, tokens, phase and learning rate at `table_steps`, with a mark where a permanent checkpoint is saved."""
    table = Table(title=_title(config), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("step", "tokens", "phase", "learning rate", "checkpoint"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for step in table_steps(config):
        table.add_row(
            f"{step:,}",
            f"{step * config.tokens_per_step:,}",
            phase_at(config, step),
            f"{learning_rate(config, step):.4e}",
            "saved" if step in config.save_steps else "",
        )
    return table


def _title(config: RunConfig) -> str:
    branch = config.branch_from
    parent = f", branches from {branch.run} at step {branch.step:,}" if branch else ""
    return (
        f"{config.name}: {config.total_steps - first_step(config):,} updates of {config.tokens_per_step:,} tokens, "
        f"{len(config.save_steps)} checkpoints{parent}"
    )


def _token_unit(tokens: int) -> tuple[float, str]:
    """The largest of billions, millions and thousands that leaves at least one whole unit, and its name."""
    for unit, name in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if tokens >= unit:
            return unit, f" ({name})"
    return 1.0, ""


def _curve_steps(config: RunConfig) -> list[int]:
    """Steps close enough for a smooth curve, the corners among them."""
    spread = np.linspace(first_step(config), config.total_steps, POINTS_OF_CURVE).round().astype(int)
    return sorted({*corner_steps(config), *spread.tolist()})


def draw_schedules(configs: Sequence[RunConfig], out: Path) -> None:
    """Writes a PNG with the learning rate of every run over its training tokens, its checkpoints as points.

    A run that branches from another is drawn from the step on at which it does.

    Raises:
        UserError: `out` is no PNG.
    """
    if out.suffix != ".png":
        raise UserError(f"--out {out} does not end with .png; give the name of a PNG file")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    unit, unit_name = _token_unit(max(config.total_steps * config.tokens_per_step for config in configs))
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for index, config in enumerate(configs):
            colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
            for steps, style in (
                (_curve_steps(config), {"ls": dashes, "label": config.name}),
                (config.save_steps, DOT),
            ):
                tokens = [step * config.tokens_per_step / unit for step in steps]
                axes.plot(tokens, [learning_rate(config, step) for step in steps], color=colour, **style)
        axes.set(xlabel=f"training tokens{unit_name}", ylabel="learning rate")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", scilimits=(-2, 2), useMathText=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        handles = [*axes.get_legend_handles_labels()[0], Line2D([], [], color="0.4", label="checkpoint", **DOT)]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        with replaced_file(out) as aside:
            figure.savefig(aside, format="png", dpi=150)
