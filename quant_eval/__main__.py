"""python -m quant_eval: the cost of quantizing an HF checkpoint.

What brings torch is imported where it is needed: that takes seconds, too long for --help, bad
input, or a result that is there already.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from base.aligned import aligned, wrapped
from base.cli import command_group, options_of, quick_imports, run_command
from base.environment import is_rank_zero
from base.errors import UserError
from base.names import take_one_of
from base.statistics import INTERVAL_LEVEL, pairs_of
from ckpt_tools.hf.comparing import All, Out, Pairs, Results, report
from ckpt_tools.hf.directory import compared_results, result_directories, write_result
from ckpt_tools.hf.measured import Outliers, Quantization, Read, Tasks
from ckpt_tools.hf.model import read_hf_config
from ckpt_tools.hf.results import Result, read_result
from quant_eval import shown
from quant_eval.compare import FIGURES, METHOD, compare
from quant_eval.formats import CACHE_SOURCE, FORMATS
from quant_eval.kept import kept_outliers, kept_run, kept_tasks
from quant_eval.measuring.statistics import UNITS
from quant_eval.quantizer import QuantSpec, parts_of
from quant_eval.quantizers import QUANTIZERS
from quant_eval.rotations import ROTATIONS, SHIFT_SOURCE, SMOOTH_SOURCE
from quant_eval.settings import (
    LINEARS,
    CalibrationSettings,
    OutlierRunSettings,
    RunSettings,
    TaskSettings,
)
from quant_eval.specs import EXAMPLES, parse_spec
from train.data.corpus import open_corpus
from train.model.families import ARCHITECTURES

# Commands and options, and what other programs call them.
SYNONYMS = {
    "run": "quantize measure eval evaluate start",
    "compare": "diff test",
    "tasks": "harness benchmark benchmarks lm-eval",
    "methods": "specs list quantizers",
    "--spec": "bit bits method quantizer w-bits wbits",
    "--calibration": "calib calibration-data dataset",
    "--documents": "samples",
}
app = command_group(__doc__)

Models = Annotated[list[Path], typer.Argument(help="HF directories, measured one after the other.")]
Specs = Annotated[
    list[str], typer.Option(help="What to quantize with, such as gptq-b3-g128. Repeatable.")
]


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
    outs = result_directories(hf_dirs, "quant", [parsed.name for parsed in specs], out)
    settings = settings.of_specs(specs)
    # Every model is checked before the first is measured.
    for hf_dir in hf_dirs:
        read_hf_config(hf_dir, ARCHITECTURES)
    texts = _calibration_sha256(settings), open_corpus(settings.eval).manifest.sha256
    todo = _pending(hf_dirs, specs, outs, partial(kept_run, settings=settings, texts=texts))
    if todo:
        with quick_imports():
            from base.ranks import start
            from quant_eval.measuring.measurement import measure

        ranks = start(settings.device)
        for hf_dir, specs_of_model, directories in todo:
            _write(directories, measure(hf_dir, specs_of_model, directories, settings, ranks))
    _show(outs, Quantization, todo)


@app.command()
@options_of(TaskSettings)
def tasks(hf_dirs: Models, spec: Specs, settings: TaskSettings) -> None:
    """Write HF_DIR/tasks/SPEC/result.json: accuracy before and after quantization, by item.

    Under torchrun all processes share the questions. A result of the same model, spec and settings
    is kept.

    Example: python -m quant_eval tasks run/hf/step00012000 --spec gptq-b3-g128
    --calibration data/train --tasks arc_easy,piqa
    """
    specs = [parse_spec(text) for text in spec]
    outs = result_directories(hf_dirs, "tasks", [parsed.name for parsed in specs], None)
    settings = settings.of_specs(specs)
    # Every model is checked before the first is measured.
    for hf_dir in hf_dirs:
        read_hf_config(hf_dir, ARCHITECTURES)
    calibration = _calibration_sha256(settings)
    look_up = partial(kept_tasks, settings=settings, calibration=calibration)
    todo = _pending(hf_dirs, specs, outs, look_up)
    if todo:
        from quant_eval.tasks.loading import load_tasks
        from quant_eval.tasks.measurement import measure

        loaded = load_tasks(settings)
        for hf_dir, specs_of_model, directories in todo:
            _write(directories, measure(hf_dir, specs_of_model, loaded, settings))
    _show(outs, Tasks, todo)


@app.command()
@options_of(OutlierRunSettings)
def outliers(
    hf_dirs: Models,
    settings: OutlierRunSettings,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of result.json, for one HF directory.",
            show_default=f"HF_DIR/outliers/{LINEARS}",
        ),
    ] = None,
) -> None:
    """Write result.json: outlier statistics of the inputs and weights of every linear.

    Kurtosis, the largest value over the mean and over the median of its row, and the share of the
    squared norm in 1% of channels. Under torchrun all processes share the text. A result of the
    same model and settings is kept.

    Example: python -m quant_eval outliers run/hf/step00012000 --data data/held_out
    """
    outs = result_directories(hf_dirs, "outliers", [LINEARS], [out] if out else None)
    # Every model is checked before the first is measured.
    for hf_dir in hf_dirs:
        read_hf_config(hf_dir, ARCHITECTURES)
    sha256 = open_corpus(settings.data).manifest.sha256
    todo = [
        (hf_dir, directories)
        for hf_dir, directories in zip(hf_dirs, outs, strict=True)
        if kept_outliers(directories[0], hf_dir, settings, sha256) is None
    ]
    if todo:
        with quick_imports():
            from base.ranks import start
            from quant_eval.measuring.outliers import measure

        ranks = start(settings.device)
        for hf_dir, directories in todo:
            _write(directories, [measure(hf_dir, settings, ranks)])
    _show(outs, Outliers, todo)


@app.command()
def methods(whole: All = False) -> None:
    """List what a spec can be: methods, formats and transforms; with --all parts and sources.

    Example: python -m quant_eval methods --all
    """
    if whole:
        _list_parts()
        return
    print("\n".join(wrapped(f"a spec is METHOD-bBITS and settings: {EXAMPLES}")))
    rows = [
        (each.method, ", ".join(map(str, each.widths)), ", ".join(each.saved) or "-")
        for each in QUANTIZERS
    ]
    print("\n".join(["", *aligned([("method", "bits", "saved as checkpoints for"), *rows]), ""]))
    rotations = [f"{name}{'64' if row.takes_block else ''}" for name, row in ROTATIONS.items()]
    for title, names in (
        ("formats in place of bits", [*FORMATS]),
        ("transforms", ["smooth0.5", "baseq", *rotations]),
        ("KV cache", ["kv8", "kv4", "kvfp8"]),
    ):
        print("\n".join(wrapped(f"{title}: {', '.join(names)}")))
    print("--all explains every part of a name, with its default and source")


def _list_parts() -> None:
    """Print the parts of the names of every method, and all sources."""
    print(
        "Weights: METHOD or FORMAT or METHOD-FORMAT, or w4a4 for RTN with activations of 4 bits\n"
    )
    for quantizer in QUANTIZERS:
        bits = ", ".join(map(str, quantizer.widths))
        print(f"{quantizer.method:<10} bits {bits:<20} {quantizer.source}")
        print(f"{'':<10} {_parts(quantizer)}")
        if quantizer.saved:
            print(f"{'':<10} checkpoints: {', '.join(quantizer.saved)}")
        print()
    print("Formats, for rtn and gptq, and after -a for activations:\n")
    for form, numbers in FORMATS.items():
        print(f"{form:<10} {numbers.source}")
    print("\nTransforms of what linears read, for rtn, gptq and none:\n")
    print(f"{'smooth0.5':<20} {SMOOTH_SOURCE}\n{'baseq':<20} {SHIFT_SOURCE}")
    for rotation, row in ROTATIONS.items():
        print(f"{rotation + ('[64]' if row.takes_block else ''):<20} {row.source}")
    print(f"\nKV cache, for methods of quantdyn:\n\n{'kv8, kv4, kvfp8':<20} {CACHE_SOURCE}")
    parts = [part for field, part in parts_of(QuantSpec).items() if field != "bits"]
    common = "".join(f"[-{part.syntax}]" for part in parts)
    print(f"\nThe parts after those of the method, in this order:\n\n{common}")
    print(f"\nexamples: {EXAMPLES}")


def _parts(quantizer: type[QuantSpec]) -> str:
    """Return the parts of a quantizer's names that not all have, and the defaults of these."""
    parts, defaults = list[str](), list[str]()
    for field, part in parts_of(quantizer).items():
        info, common = quantizer.model_fields[field], QuantSpec.model_fields.get(field)
        if common and field != "bits" and info.default == common.default:
            continue
        is_needed = info.is_required() and (field != "bits" or len(quantizer.widths) > 1)
        parts.append(f"-({part.syntax})" if is_needed else f"[-{part.syntax}]")
        if not info.is_required():
            defaults.append(f"{field} {info.default}")
    return "".join(parts) + (f"; default: {', '.join(defaults)}" if defaults else "")


@app.command("compare")
def compare_command(
    results: Results,
    figure: Annotated[
        str, typer.Option(help="Of the results, such as kl_divergence.")
    ] = "relative_error",
    pairs: Pairs = "baseline",
    out: Out = None,
    whole: All = False,
) -> None:
    """Compare results on the same documents: differences, paired intervals, corrected tests.

    The verdict on a pair is by its p-value after Holm's correction over all pairs of the call; the
    95% intervals are not corrected.

    Example: python -m quant_eval compare run/hf/step*/quant/gptq-b3-g128 --figure kl_divergence
    """
    if figure not in FIGURES:
        raise UserError(f"no figure is called '{figure}'; {take_one_of(figure, FIGURES)}")
    contents = [read_result(path, Quantization) for path in compared_results(results)]
    comparisons = compare(contents, pairs_of(len(contents), pairs), figure)
    settings = {
        "figure": figure,
        "unit": UNITS[figure],
        "pairing": pairs,
        "method": METHOD,
        "level": INTERVAL_LEVEL,
    }
    sources = " or of ".join(sorted({each.sources for each in comparisons}))
    note = (
        f"Intervals hold for another draw of {sources}, and for these trainings only: another seed"
        " may differ by more."
    )
    report(contents, comparisons, shown.FIGURES[figure], settings, note, out=out, whole=whole)


def _calibration_sha256(settings: CalibrationSettings) -> str | None:
    return open_corpus(settings.calibration).manifest.sha256 if settings.calibration else None


def _pending(
    hf_dirs: list[Path],
    specs: list[QuantSpec],
    outs: list[list[Path]],
    look_up: Callable[[Path, Path, QuantSpec], Result[Any] | None],
) -> list[tuple[Path, list[QuantSpec], list[Path]]]:
    """Return the specs to measure for each model, with their directories.

    `look_up` returns a result that is there already, which is kept.
    """
    todo = []
    for hf_dir, directories in zip(hf_dirs, outs, strict=True):
        pending = [
            (spec, directory)
            for spec, directory in zip(specs, directories, strict=True)
            if look_up(directory, hf_dir, spec) is None
        ]
        if pending:
            todo.append((hf_dir, [spec for spec, _ in pending], [each for _, each in pending]))
    return todo


def _write(directories: list[Path], contents: Iterable[dict[str, Any]]) -> None:
    """Write each result as soon as it is measured, on the first rank."""
    # Every rank iterates: ranks compute each of the contents together, when it is asked for.
    for directory, content in zip(directories, contents, strict=True):
        if is_rank_zero():
            write_result(directory, content)


def _show(outs: list[list[Path]], kind: type[Read], measured: Sequence[tuple[Any, ...]]) -> None:
    """Print the results in `outs`; those in the last places of `measured` were measured now."""
    if not is_rank_zero():
        return
    results = [read_result(directory, kind) for directories in outs for directory in directories]
    kept = len(results) - sum(len(directories) for *_, directories in measured)
    print("\n".join(shown.lines(results, kept)))


if __name__ == "__main__":
    run_command(app, "quant_eval", SYNONYMS)
