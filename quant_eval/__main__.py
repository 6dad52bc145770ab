"""`python -m quant_eval`: the cost of quantizing an HF checkpoint.

What brings torch is imported where it is needed: that takes seconds, too long for --help, bad
input, or a result that is there already.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from base.cli import one_process_only, options_of, run_command
from base.environment import is_rank_zero
from ckpt_tools.hf.directory import result_directories, write_result
from ckpt_tools.hf.measured import Accuracy, Quantization, Tasks
from ckpt_tools.hf.model import read_hf_config
from ckpt_tools.hf.results import Result, read_result
from quant_eval.compare_command import compare_command
from quant_eval.kept import kept_run, kept_tasks
from quant_eval.methods import METHODS
from quant_eval.model.families import ARCHITECTURES
from quant_eval.settings import RunSettings
from quant_eval.specs import EXAMPLES, parse_spec
from quant_eval.tasks.settings import TaskSettings
from train.data.corpus import open_corpus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Models = Annotated[list[Path], typer.Argument(help="HF directories, measured one after the other.")]
Specs = Annotated[
    list[str], typer.Option(help="What to quantize with, such as gptq-b3-g128. Repeatable.")
]


@app.callback()
def quant_eval() -> None:
    """Quantize HF checkpoints and measure what that costs."""


@app.command()
@options_of(RunSettings)
def run(
    hf_dirs: Models,
    spec: Specs,
    settings: RunSettings,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Directory of result.json, one per --spec, in the same order.",
            show_default="HF_DIR/quant/SPEC",
        ),
    ] = None,
) -> None:
    """Write result.json: losses before and after quantization, with intervals, by document.

    'python -m quant_eval methods' lists what a spec can be. Under torchrun all processes share the
    work. A result of the same model, spec and settings is kept.

    Example: python -m quant_eval run run/hf/step00012000 --spec gptq-b3-g128 --spec awq-b4-g128
    --calibration data/train --eval data/held_out
    """
    specs = [parse_spec(text) for text in spec]
    outs = result_directories(hf_dirs, "quant", [one.name for one in specs], out)
    contexts = [_context(hf_dir) for hf_dir in hf_dirs]
    texts = open_corpus(settings.calibration), open_corpus(settings.eval)
    todo = []
    for hf_dir, context, directories in zip(hf_dirs, contexts, outs, strict=True):
        pending = []
        for one, directory in zip(specs, directories, strict=True):
            kept = kept_run(directory, hf_dir, context, one, settings, texts)
            if kept is None:
                pending.append((one, directory))
            else:
                _print_losses(kept, "kept, measured before")
        if pending:
            todo.append((hf_dir, pending))
    if not todo:
        return

    from base.ranks import start
    from quant_eval.measuring.measurement import Request, measure

    ranks = start(settings.device)
    for hf_dir, pending in todo:
        request = Request(
            hf_dir, tuple(one for one, _ in pending), tuple(place for _, place in pending), settings
        )
        for directory, content in zip(request.outs, measure(request, ranks), strict=True):
            if ranks.rank == 0:
                write_result(directory, content)
                _print_losses(read_result(directory, Quantization), "measured")


@app.command()
@options_of(TaskSettings)
def tasks(hf_dirs: Models, spec: Specs, settings: TaskSettings) -> None:
    """Write HF_DIR/tasks/SPEC/result.json: accuracy before and after quantization, by item.

    A result of the same model, spec and settings is kept.

    Example: python -m quant_eval tasks run/hf/step00012000 --spec gptq-b3-g128
    --calibration data/train --tasks arc_easy,piqa
    """
    specs = [parse_spec(text) for text in spec]
    outs = result_directories(hf_dirs, "tasks", [one.name for one in specs], None)
    one_process_only("quant_eval tasks")
    for hf_dir in hf_dirs:
        _context(hf_dir)
    calibration = open_corpus(settings.calibration)
    todo = []
    for hf_dir, directories in zip(hf_dirs, outs, strict=True):
        pending = []
        for one, directory in zip(specs, directories, strict=True):
            kept = kept_tasks(directory, hf_dir, one, settings, calibration)
            if kept is None:
                pending.append((one, directory))
            else:
                _print_accuracies(kept, "kept, measured before")
        if pending:
            todo.append((hf_dir, pending))
    if not todo:
        return

    from quant_eval.tasks.loading import load_tasks
    from quant_eval.tasks.measurement import measure

    loaded = load_tasks(settings)
    for hf_dir, pending in todo:
        contents = measure(hf_dir, [one for one, _ in pending], loaded, settings)
        for (_, directory), content in zip(pending, contents, strict=True):
            write_result(directory, content)
            _print_accuracies(read_result(directory, Tasks), "measured")


@app.command()
def methods() -> None:
    """List the quantization methods, the bits they take, their settings and their sources.

    Example: python -m quant_eval methods
    """
    for name, method in METHODS.items():
        settings = ", ".join(
            f"{key} {'stated' if value is None else value}"
            for key, value in method.defaults.items()
        )
        print(f"{name:<10} bits {', '.join(map(str, method.bits)):<20} {method.source}")
        print(f"{'':<10} {settings}")
    print(f"\nexamples: {EXAMPLES}")


app.command("compare")(compare_command)


def _context(hf_dir: Path) -> int:
    """Return the tokens that a model sees at most; UserError for one that is not measured."""
    config = read_hf_config(hf_dir, ARCHITECTURES)
    return int(config.get("max_position_embeddings", 0))


def _print_losses(result: Result[Quantization], how: str) -> None:
    if not is_rank_zero():
        return
    measured = result.measured
    _print_head(result, how)
    print(
        f"  loss {measured.cross_entropy:.4f} -> {measured.cross_entropy_quantized:.4f} nats per"
        f" token, relative error {_interval(measured, 'relative_error')},"
        f" KL {_interval(measured, 'kl_divergence')}"
    )


def _print_accuracies(result: Result[Tasks], how: str) -> None:
    _print_head(result, how)
    rows = result.measured.tasks
    if result.measured.mean and len(rows) > 1:
        rows = rows | {"mean": result.measured.mean}
    for name, row in rows.items():
        print(
            f"  {name}: accuracy {row.accuracy:.4f} -> {row.accuracy_quantized:.4f},"
            f" difference {_interval(row, 'difference')}"
        )


def _print_head(result: Result[Any], how: str) -> None:
    print(f"{result.spec.name} of {result.model.path}: {how}, {result.path}")


def _interval(measured: Quantization | Accuracy, figure: str) -> str:
    """Return a figure with its interval."""
    interval = measured.intervals.get(figure)
    bounds = f" [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else ""
    return f"{getattr(measured, figure):.4g}{bounds}"


if __name__ == "__main__":
    run_command(app, "quant_eval")
