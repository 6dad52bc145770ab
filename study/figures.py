"""Every figure that a study's data allow, as PNG and PDF with its data beside."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from study.blocks import study_blocks_plot
from study.canvas import Canvas, Rows
from study.drawing import drawn, save
from study.ends import ends_plot
from study.figure_data import write_data
from study.methods import methods_plot
from study.plots import Plot
from study.prediction import prediction_plot
from study.settings import Study
from study.slices import slices_figure
from study.trajectories import averages_plot, curvature_plot, quantization_plot, quantized_loss_plot, validation_plot
from train.run_directory import replaced_file

DIRECTORY = "figures"
KINDS = ("png", "pdf")


class Drawn(NamedTuple):
    """A figure in both of its forms; without data there is no picture."""

    figure: Figure | None
    plot: Plot


Draw = Callable[[], Drawn]


class Figures(NamedTuple):
    """Name -> what was drawn, in the order of the report; and the names of figures of which nothing is measured."""

    plots: dict[str, Plot]
    empty: list[str]


def figures_of(study: Study, directory: Path, rows: Rows) -> dict[str, Draw]:
    """Name -> what draws it, of every figure that the study has something to show in, in the order of the report."""
    canvas, settings, varied = Canvas(study, rows), study.quantization, study.varied
    without = {
        "validation_loss": not study.trained,
        "averages": not study.soups and not any(run.averages for run in study.trained),
        "methods": not settings.methods,
        "curvature": not study.curvature,
    }
    without |= dict.fromkeys(("blocks", "prediction", "slices"), not settings.by_block)
    figures: dict[str, Draw] = {
        "quantization_error": lambda: _drawn(quantization_plot(canvas, "relative_error")),
        "kl_divergence": lambda: _drawn(quantization_plot(canvas, "kl_divergence")),
    }
    if varied:
        figures["ends"] = lambda: _drawn(ends_plot(canvas, varied))
    figures |= {
        "validation_loss": lambda: _drawn(validation_plot(canvas, directory)),
        "averages": lambda: _drawn(averages_plot(canvas)),
        "methods": lambda: _drawn(methods_plot(canvas)),
        "blocks": lambda: _drawn(study_blocks_plot(canvas, directory)),
        "full_against_quantized": lambda: _drawn(quantized_loss_plot(canvas)),
        "curvature": lambda: _drawn(curvature_plot(canvas)),
        "prediction": lambda: _drawn(prediction_plot(canvas, directory)),
        "slices": lambda: Drawn(*slices_figure(canvas, directory)),
    }
    return {name: draw for name, draw in figures.items() if not without.get(name)}


def _drawn(plot: Plot) -> Drawn:
    return Drawn(drawn(plot) if plot.has_data else None, plot)


def draw_all(directory: Path, study: Study, rows: Rows) -> Figures:
    """Writes STUDY/figures/NAME.png, .pdf and .csv of every figure that holds data, and removes those that do not."""
    plots, empty = {}, []
    (directory / DIRECTORY).mkdir(exist_ok=True)
    for name, draw in figures_of(study, directory, rows).items():
        figure, plot = draw()
        paths = {kind: directory / DIRECTORY / f"{name}.{kind}" for kind in (*KINDS, "csv")}
        if figure is None:
            empty.append(name)
            for path in paths.values():
                path.unlink(missing_ok=True)
            continue
        plots[name] = plot
        write_data(plot, paths["csv"])
        for kind in KINDS:
            with replaced_file(paths[kind]) as aside:
                save(figure, aside, kind)
    return Figures(plots, empty)
