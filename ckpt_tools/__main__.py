"""python -m ckpt_tools: checkpoints to HF directories and back, averages, released models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from base.cli import command_group, quick_imports, run_command
from base.errors import UserError
from train.run.optimization import Shape

# Heavy libraries are imported within the commands, after what can be refused without them.
# Commands and options, and what other programs call them.
SYNONYMS = {
    "export": "convert to-hf",
    "import": "from-hf load",
    "average": "merge soup ema lawa",
    "download": "pull fetch get",
    "publish": "upload push",
    "inspect": "info show describe details check validate verify",
}
app = command_group(__doc__)


@app.command()
def export(
    paths: Annotated[
        list[Path], typer.Argument(help="CHECKPOINT OUT, or CHECKPOINT... with --into")
    ],
    into: Annotated[
        Path | None, typer.Option(help="directory that takes one HF directory per checkpoint")
    ] = None,
) -> None:
    """Export checkpoints of either engine, at any layout, to verified HF directories.

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step* --into
    runs/tiny/lr3e-3/hf
    """
    from train.run.directory import read_checkpoint_record

    if not into and len(paths) != 2:
        raise UserError(
            f"{len(paths)} path(s) without --into; give CHECKPOINT OUT, or CHECKPOINT... --into DIR"
        )
    pairs = (
        [(path, into / path.resolve().name) for path in paths] if into else [(paths[0], paths[1])]
    )
    for checkpoint, _ in pairs:
        read_checkpoint_record(checkpoint)
    with quick_imports():
        from ckpt_tools.export import export_all

    export_all(pairs)


@app.command(name="import")
def import_(
    source: Annotated[
        str, typer.Argument(help="HF directory, or a model of the hub as OWNER/NAME@REVISION")
    ],
    out: Annotated[Path, typer.Argument(help="checkpoint to write")],
) -> None:
    """Import an HF model (OLMo2; for DeepSpeed also Llama, GPT-NeoX) that runs start from.

    A run starts from it on either engine, at any layout: add the "start_from" that is printed to
    its run.json.

    Example: python -m ckpt_tools import allenai/OLMo-2-0425-1B@stage1-step1907359-tokens4001B
    start/olmo2-1b
    """
    if "@" not in source:
        _check_directories([Path(source)], "give an HF directory, or OWNER/NAME@REVISION")
    with quick_imports():
        from ckpt_tools.importing import import_checkpoint

    import_checkpoint(source, out)


@app.command()
def average(
    out: Annotated[
        Path, typer.Argument(help="HF directory to write; with --window one per window below it")
    ],
    inputs: Annotated[list[Path], typer.Argument(help="HF directories, oldest first")],
    weights: Annotated[
        str | None, typer.Option(help="comma-separated, one per input; divided by their sum")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="LAWA: the uniform mean of every N consecutive inputs")
    ] = None,
    decay: Annotated[
        Shape | None,
        typer.Option(
            help="weights that emulate a learning rate decayed from the first input to the last"
        ),
    ] = None,
) -> None:
    """Average models: uniform by default (a soup), weighted, LAWA windows, or an emulated decay.

    Example: python -m ckpt_tools average runs/tiny/lr3e-3/lawa --window 5 runs/tiny/lr3e-3/hf/step*
    """
    _check_directories(inputs, "give HF directories made by 'python -m ckpt_tools export'")
    with quick_imports():
        from ckpt_tools.averaging import average_models

    average_models(out, inputs, weights=weights, window=window, decay=decay)


@app.command()
def download(
    source: Annotated[
        str, typer.Argument(help="repository of the hub, or a local directory of revisions")
    ],
    into: Annotated[
        Path, typer.Argument(help="directory that takes one HF directory per revision")
    ],
    revisions: Annotated[
        list[str] | None, typer.Option("--revision", help="one to fetch; repeat for several")
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="each N-th revision of a stage, and its last")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="of this stage only, such as stage2")] = None,
    family: Annotated[
        str | None, typer.Option(help="repository whose naming the revisions have, or FILE.toml")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list revisions: step, tokens, learning rate")
    ] = False,
    tokenizer_only: Annotated[
        bool, typer.Option("--tokenizer-only", help="the tokenizer alone, into INTO itself")
    ] = False,
) -> None:
    """Fetch revisions of a released model; continues where it was stopped.

    Example: python -m ckpt_tools download allenai/OLMo-2-0425-1B models/olmo2-1b --every 20 --stage
    stage1 --dry-run
    """
    if tokenizer_only:
        choice = {"--revision": revisions, "--every": every, "--stage": stage, "--family": family}
        _check_unused("--tokenizer-only", choice | {"--dry-run": dry_run})
        from ckpt_tools.released.download import fetch_tokenizer

        fetch_tokenizer(source, into)
        typer.echo(str(into))
        return
    if dry_run:
        _check_unused("--dry-run", {"--revision": revisions})
        from ckpt_tools.released.before import check_ends, pickled_revisions
        from ckpt_tools.released.trajectory import choose, revisions_of, show

        chosen = choose(revisions_of(source, family), every=every, stage=stage)
        show(chosen)
        pickled = pickled_revisions(source, check_ends(source, chosen))
        if pickled:
            typer.echo(
                f"weights of {', '.join(pickled)} are pickles: they will be converted to"
                " safetensors; of each stage the first and the last were looked at"
            )
        return
    from ckpt_tools.released.download import download as fetch

    fetch(source, into, every=every, stage=stage, family=family, revisions=revisions or [])


@app.command()
def publish(
    run_dir: Annotated[Path, typer.Argument(help="run whose exports are in RUN_DIR/hf")],
    out: Annotated[Path, typer.Argument(help="directory to write")],
    licence: Annotated[str, typer.Option("--license", help="for the model cards")] = "other",
) -> None:
    """Lay out a run's exports for the hub: names in OLMo's style, and a model card each.

    Example: python -m ckpt_tools publish runs/tiny/lr3e-3 published/lr3e-3
    """
    from train.run.config import load_run

    load_run(run_dir / "run.json")
    from ckpt_tools.publishing import publish as lay_out

    lay_out(run_dir, out, license=licence)


@app.command()
def inspect(
    paths: Annotated[list[Path], typer.Argument(help="checkpoints, HF directories or runs")],
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="check files by hash, and every module's output by the probe"
        ),
    ] = False,
    whole: Annotated[
        bool, typer.Option("--all", help="all facts of each, its files and tensors")
    ] = False,
) -> None:
    """Print what a checkpoint, an HF directory or a run is, and whether it is sound.

    Example: python -m ckpt_tools inspect --verify runs/tiny/lr3e-3/hf/step00000640
    """
    _check_directories(paths, "give one of RUN, RUN/checkpoints/NAME, RUN/hf/NAME")
    with quick_imports():
        from ckpt_tools.inspecting import inspect as describe

    describe(paths, check=verify, whole=whole)


def _check_unused(mode: str, options: Mapping[str, object]) -> None:
    """Raise UserError if one of the options is given, of which a mode would take no notice."""
    given = [name for name, value in options.items() if value]
    if given:
        raise UserError(f"{mode} takes no {', '.join(given)}; leave out one or the other")


def _check_directories(paths: list[Path], next_action: str) -> None:
    """Raise UserError for a path that is not a directory."""
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; {next_action}")


if __name__ == "__main__":
    run_command(app, "ckpt_tools", SYNONYMS)
