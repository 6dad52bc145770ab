"""python -m curvature: the sharpness of the loss of HF language models, with its errors.

Everything that imports torch or transformers is imported where it is needed: --help and bad input
should not wait for that.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from base.cli import command_group, options_of, quick_imports, run_command
from base.errors import UserError
from base.statistics import INTERVAL_LEVEL, pairs_of
from ckpt_tools.hf import comparing
from ckpt_tools.hf.directory import (
    compared_results,
    hf_directory_of,
    result_directories,
    write_result,
)
from ckpt_tools.hf.measured import (
    Critical,
    Curvature,
    MeasuredStep,
    Read,
    Slice,
    TrajectoryPlane,
)
from ckpt_tools.hf.results import read_result
from curvature.settings import (
    CriticalSettings,
    CurvatureSettings,
    HutchinsonSettings,
    LanczosSettings,
    SliceSettings,
    StepSettings,
)
from train.data.corpus import open_corpus

HFDir = Annotated[Path, typer.Argument(metavar="HF_DIR", help="Full-precision model.")]
HFDirs = Annotated[
    list[Path], typer.Argument(metavar="HF_DIR", help="Models, measured one after the other.")
]
Data = Annotated[Path, typer.Option(help="Prefix of the files of 'python -m train prepare'.")]
Out = Annotated[
    Path | None, typer.Option(help="Directory of the result; by default HF_DIR/curvature/NAME.")
]
DryRun = Annotated[
    str | None,
    typer.Option(
        metavar="GPUS",
        help="Print the cost on GPUs such as h100 or 8xh200 instead; config.json is enough.",
    ),
]

# Commands and options, and what other programs call them.
SYNONYMS = {
    "hutchinson": "trace traces hessian diagonal",
    "lanczos": "eigenvalue eigenvalues sharpness lambda-max top",
    "slice": "landscape surface plane",
    "pca": "trajectory components principal",
    "compare": "diff",
}
app = command_group(__doc__)


@app.command()
@options_of(HutchinsonSettings)
def hutchinson(
    hf_dirs: HFDirs,
    data: Data,
    settings: HutchinsonSettings,
    out: Out = None,
    dry_run: DryRun = None,
) -> None:
    """Write result.json: traces of the Hessian of the mean loss per token, and its top eigenvalue.

    Under torchrun all processes share the work.

    Example: python -m curvature hutchinson hf/step00000400 --data data/held_out
    """
    _measure(hf_dirs, settings, data, out, dry_run)


@app.command()
@options_of(LanczosSettings)
def lanczos(
    hf_dirs: HFDirs,
    data: Data,
    settings: LanczosSettings,
    out: Out = None,
) -> None:
    """Write result.json: eigenvalues of both ends of the Hessian's spectrum, and its density.

    Under torchrun all processes share the work.

    Example: python -m curvature lanczos hf/step00000400 --data data/held_out
    """
    _measure(hf_dirs, settings, data, out)


def _measure(
    hf_dirs: list[Path],
    settings: CurvatureSettings,
    data: Path,
    out: Path | None,
    dry_run: str | None = None,
) -> None:
    outs = [out] if out else None
    groups = result_directories(hf_dirs, "curvature", [settings.name], outs)
    _check_models(*hf_dirs)
    if dry_run is not None:
        from ckpt_tools.hf.configuration import read_config
        from curvature.cost.plan import GpuPlan, cost_lines, estimate

        plan = GpuPlan.parse(dry_run)
        for hf_dir in hf_dirs:
            cost = estimate(read_config(hf_dir), settings, plan)
            typer.echo(f"{hf_dir}: " + "\n".join(cost_lines(cost, settings, plan)))
        return
    # Opened only to refuse a text that cannot be used before the slow imports.
    open_corpus(data)
    with quick_imports():
        from base.ranks import start
        from curvature.measurement import measure

    ranks = start(settings.device)
    for hf_dir, (directory,) in zip(hf_dirs, groups, strict=True):
        result = measure(hf_dir, settings, data, ranks)
        if ranks.rank == 0:
            write_result(directory, result)
    if ranks.rank == 0:
        _show([directory for (directory,) in groups], Curvature)


def _check_models(*hf_dirs: Path) -> None:
    """Raise UserError for a model that is not there."""
    for hf_dir in hf_dirs:
        if not (hf_dir / "config.json").is_file():
            raise UserError(
                f"{hf_dir / 'config.json'} does not exist; give an HF directory made by 'python -m"
                " ckpt_tools export'"
            )


def _show(directories: Sequence[Path], kind: type[Read]) -> None:
    """Print the results in these directories."""
    from curvature import shown

    typer.echo("\n".join(shown.lines([read_result(each, kind) for each in directories])))


@app.command()
@options_of(StepSettings)
def step(
    hf_dir: HFDir,
    quantized: Annotated[
        list[Path], typer.Option(help="Result of 'quant_eval run --dense' for HF_DIR. Repeatable.")
    ],
    data: Data,
    settings: StepSettings,
    out: Annotated[
        list[Path] | None, typer.Option(help="Directories of the results, one per --quantized.")
    ] = None,
) -> None:
    """Write result.json: predicted and measured loss increase of a quantization step, by block.

    Predicted is g.delta + delta'H delta / 2 for delta = quantized - full precision; measured is the
    difference of the losses of the same microbatches. The curvature along the step is compared with
    that of a random one.

    Example: python -m curvature step hf/step00000640 --quantized hf/step00000640/quant/gptq-b3-g128
    --data data/held_out
    """
    names = [f"step-{directory.resolve().name}" for directory in quantized]
    (directories,) = result_directories([hf_dir], "curvature", names, out)
    if clashes := {path.resolve() for path in directories} & {path.resolve() for path in quantized}:
        raise UserError(
            f"{clashes.pop()} holds the result to be explained, which would be lost; give another"
            " --out"
        )
    _check_models(hf_dir)
    open_corpus(data)
    with quick_imports():
        from base.ranks import start
        from curvature.step.measurement import measure

    ranks = start(settings.device)
    results = measure(hf_dir, quantized, settings, data, ranks)
    # Every rank takes every result, as all of them compute; rank 0 alone writes.
    for directory, result in zip(directories, results, strict=True):
        if ranks.rank == 0:
            write_result(directory, result)
    if ranks.rank == 0:
        _show(directories, MeasuredStep)


@app.command("slice")
@options_of(SliceSettings)
def slice_(
    points: Annotated[
        list[Path],
        typer.Argument(
            metavar="POINT",
            help="HF directories, or results HF_DIR/quant/SPEC of 'quant_eval run --dense'.",
        ),
    ],
    data: Data,
    settings: SliceSettings,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Of a point, in their order; by default its directory's. Repeatable."),
    ] = None,
    out: Out = None,
) -> None:
    """Write result.json: the loss on the plane through three models.

    Such as a checkpoint, the one before and the quantized one (arXiv:2510.06213), or the end at a
    constant rate, the annealed weights and an average. Distances in the plane are Euclidean; by
    default the result is beside the first point. Under torchrun all processes share the grid.

    Example: python -m curvature slice hf/step00000640 hf/step00000592
    hf/step00000640/quant/gptq-b3-g128 --data data/held_out
    """
    if len(points) != 3:
        raise UserError(f"{len(points)} points make no plane; give three")
    names = name or [point.resolve().name for point in points]
    if len(names) != 3 or len(set(names)) != 3:
        raise UserError(f"the points are named {', '.join(names)}; give --name for each of three")
    if any("/" in each for each in names):
        raise UserError(f"the points are named {', '.join(names)}; give names without slash")
    specs, outs = [f"slice-{names[-1]}"], [out] if out else None
    hf_dirs = [hf_directory_of(point) for point in points]
    ((directory,),) = result_directories(hf_dirs[:1], "curvature", specs, outs)
    open_corpus(data)
    with quick_imports():
        from base.ranks import start
        from curvature.slices.measurement import measure

    ranks = start(settings.device)
    result = measure(points, names, settings, data, ranks)
    if ranks.rank == 0:
        write_result(directory, result)
        _show([directory], Slice)


@app.command()
@options_of(SliceSettings)
def pca(
    hf_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="HF_DIR", help="Checkpoints of one run, in their order."),
    ],
    data: Data,
    settings: SliceSettings,
    project: Annotated[
        list[Path] | None,
        typer.Option(help="Checkpoint that is projected alone, such as a cooldown's. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the result; by default curvature/pca of the last HF_DIR."),
    ] = None,
) -> None:
    """Write result.json: the loss on the plane of a trajectory's first two principal components.

    With the projections of all checkpoints, and how far from the plane they are. Weights of a
    model are in memory twice, however many there are. Under torchrun all processes share the grid.

    Example: python -m curvature pca lr1/hf/step* --project cooled/hf/step00000640
    --data data/held_out
    """
    outs = [out] if out else None
    ((directory,),) = result_directories(hf_dirs[-1:], "curvature", ["pca"], outs)
    _check_models(*hf_dirs, *(project or []))
    open_corpus(data)
    with quick_imports():
        from base.ranks import start
        from curvature.slices.principal import measure

    ranks = start(settings.device)
    result = measure(hf_dirs, project or [], settings, data, ranks)
    if ranks.rank == 0:
        write_result(directory, result)
        _show([directory], TrajectoryPlane)


@app.command()
@options_of(CriticalSettings)
def critical(
    hf_dirs: HFDirs,
    data: Data,
    settings: CriticalSettings,
    previous: Annotated[
        list[Path] | None,
        typer.Option(help="HF directory of the checkpoint before, one per HF_DIR in their order."),
    ] = None,
    quantized: Annotated[
        list[Path] | None,
        typer.Option(help="Result of 'quant_eval run --dense' for a single HF_DIR. Repeatable."),
    ] = None,
    out: Out = None,
) -> None:
    """Write result.json: curvature and critical sharpness along directions, by forward passes.

    The directions are the move from the checkpoint before and the steps to quantized weights. Of
    each: slope and curvature from a symmetric pair of losses, and the multiple at which the loss
    exceeds the model's (critical sharpness, arXiv:2601.16979), with fewer than 10 forward passes
    and the memory of inference. Under torchrun all processes share the sequences.

    Example: python -m curvature critical hf/step00000640 --previous hf/step00000592
    --quantized hf/step00000640/quant/gptq-b3-g128 --data data/held_out
    """
    before, results = previous or [], quantized or []
    if not before and not results:
        raise UserError("a direction is needed; give --previous, --quantized or both")
    if before and len(before) != len(hf_dirs):
        raise UserError(
            f"{len(before)} --previous for {len(hf_dirs)} HF directories; give one for each"
        )
    if results and len(hf_dirs) > 1:
        raise UserError("--quantized is of one model; give a single HF_DIR")
    groups = result_directories(hf_dirs, "curvature", ["critical"], [out] if out else None)
    _check_models(*hf_dirs, *before)
    open_corpus(data)
    with quick_imports():
        from base.ranks import start
        from curvature.critical.measurement import measure

    ranks = start(settings.device)
    befores: list[Path | None] = [*before] or [None] * len(hf_dirs)
    for hf_dir, hf_before, (directory,) in zip(hf_dirs, befores, groups, strict=True):
        result = measure(hf_dir, hf_before, results, settings, data, ranks)
        if ranks.rank == 0:
            write_result(directory, result)
    if ranks.rank == 0:
        _show([directory for (directory,) in groups], Critical)


@app.command()
def compare(
    results: comparing.Results,
    pairs: comparing.Pairs = "baseline",
    out: comparing.Out = None,
    whole: comparing.All = False,
) -> None:
    """Compare traces of the same microbatches and probes: differences, paired intervals, tests.

    The verdict on a pair is by its p-value after Holm's correction over all pairs of the call; the
    95% intervals are not corrected.

    Example: python -m curvature compare run/hf/step*/curvature/hutchinson --pairs successive
    """
    paths = compared_results(results)
    from curvature import shown
    from curvature.trace import estimates

    contents = [read_result(path, Curvature) for path in paths]
    level = INTERVAL_LEVEL
    comparisons = estimates.compare(contents, pairs_of(len(contents), pairs), level=level)
    comparing.report(
        contents,
        comparisons,
        shown.TRACE,
        {
            "figure": "trace",
            "unit": estimates.TRACE_UNIT,
            "pairing": pairs,
            "level": level,
            "method": estimates.METHOD,
        },
        estimates.NOTE,
        out=out,
        whole=whole,
    )


if __name__ == "__main__":
    run_command(app, "curvature", SYNONYMS)
