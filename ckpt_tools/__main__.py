"""python -m ckpt_tools: checkpoints to HF directories and back, averages, checks, and the trajectories of others."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from train.command import UserError, run_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Processes = Annotated[int | None, typer.Option(min=1, help="processes at once; by default one per core, up to 8")]


class Dtype(StrEnum):
    """Types that weights are written in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Precision(StrEnum):
    """Types that sums are accumulated in."""

    fp32 = "fp32"
    fp64 = "fp64"


class Which(StrEnum):
    """Which weights of a checkpoint."""

    trained = "trained"
    main = "main"


class Engine(StrEnum):
    """Whose checkpoint an import becomes."""

    either = "either"
    megatron = "megatron"
    deepspeed = "deepspeed"


WhichWeights = Annotated[
    Which, typer.Option(help="trained: as the model computed with them; main: the optimizer's fp32")
]


@app.callback()
def _commands() -> None:
    """Checkpoints to HF directories and back, averages, checks, and the trajectories of others."""


@app.command()
def export(
    paths: Annotated[list[Path], typer.Argument(help="CHECKPOINT OUT, or CHECKPOINT... with --into")],
    into: Annotated[Path | None, typer.Option(help="directory that takes one HF directory per checkpoint")] = None,
    weights: WhichWeights = Which.trained,
    dtype: Annotated[Dtype | None, typer.Option(help="type to write; by default the stored one")] = None,
    processes: Processes = None,
) -> None:
    """Export checkpoints and averages (RUN/checkpoints/*, of either engine at any layout) to verified HF directories.

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step00000640 hf/step00000640

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step* --into runs/tiny/lr3e-3/hf
    """
    from ckpt_tools.export import export_all

    if not into and len(paths) != 2:
        raise UserError(f"{len(paths)} path(s) without --into; give CHECKPOINT OUT, or CHECKPOINT... --into DIR")
    pairs = [(path, into / path.name) for path in paths] if into else [(paths[0], paths[1])]
    export_all(pairs, main=weights is Which.main, dtype=dtype and dtype.value, processes=processes)


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(help="HF directory, or a model of the hub as NAME@REVISION")],
    out: Annotated[Path, typer.Argument(help="checkpoint to write")],
    engine: Annotated[
        Engine, typer.Option(help="whose format; 'either' holds weights alone and starts both")
    ] = Engine.either,
    optimizer_state: Annotated[
        bool, typer.Option(help="with fresh optimizer state: fp32 weights, zero moments")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="of the weights; by default what lineage or revision say")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="seen by the weights; as --step")] = None,
    processes: Processes = None,
) -> None:
    """Import an HF model (OLMo2; for DeepSpeed also Llama and GPT-NeoX) as a checkpoint that runs start from.

    A run starts from it at any layout: `"start_from"` in its run.json, which this command prints.

    Example: python -m ckpt_tools import allenai/OLMo-2-0425-1B@stage1-step1907359-tokens4001B start/olmo2-1b
    """
    from ckpt_tools.importing import import_checkpoint

    import_checkpoint(
        source,
        out,
        engine=engine.value,
        optimizer_state=optimizer_state,
        step=step,
        tokens=tokens,
        processes=processes,
    )


@app.command()
def verify(
    hf_dirs: Annotated[list[Path], typer.Argument(help="HF directories")],
    out: Annotated[Path | None, typer.Option(help="JSON file that takes the figures")] = None,
) -> None:
    """Check HF directories: files by hash, keys by configuration, every module against the training engine's output.

    Example: python -m ckpt_tools verify runs/tiny/lr3e-3/hf/step00000640
    """
    from ckpt_tools.verify import verify_directories

    verify_directories(hf_dirs, out=out)


@app.command()
def reshard(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint of either engine")],
    out: Annotated[Path, typer.Argument(help="checkpoint to write")],
    tensor: Annotated[int, typer.Option(min=1, help="tensor-parallel size; megatron")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="pipeline stages; megatron")] = 1,
    virtual_pipeline: Annotated[int, typer.Option(min=1, help="model chunks of a stage; megatron")] = 1,
    data: Annotated[int, typer.Option(min=1, help="data-parallel size")] = 1,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage; deepspeed, by default as it is")] = None,
    processes: Processes = None,
) -> None:
    """Rewrite a checkpoint as another layout would have saved it, without starting an engine.

    Example: python -m ckpt_tools reshard RUN/checkpoints/step00012000 OUT --tensor 4 --pipeline 2 --data 8
    """
    from ckpt_tools.reshard import reshard_checkpoint

    reshard_checkpoint(
        checkpoint,
        out,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        data=data,
        zero=zero,
        processes=processes,
    )


@app.command()
def average(
    out: Annotated[Path, typer.Argument(help="HF directory to write; with --window one per window below it")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="HF directories or checkpoints, oldest first")] = None,
    weights: Annotated[
        str | None, typer.Option(help="comma-separated, one per input; they are divided by their sum")
    ] = None,
    decay: Annotated[float | None, typer.Option(help="exponential: each input weighs this times its successor")] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="LAWA: the uniform mean of every N consecutive inputs")
    ] = None,
    accumulate: Annotated[Precision, typer.Option(help="type of the sums")] = Precision.fp32,
    dtype: Annotated[Dtype | None, typer.Option(help="type to write; by default the inputs'")] = None,
    from_lineage: Annotated[
        Path | None, typer.Option(help="lineage.json of an average to make again, bit for bit")
    ] = None,
    processes: Processes = None,
) -> None:
    """Average models: uniform by default (a soup), weighted, exponential, or LAWA windows.

    Example: python -m ckpt_tools average hf/soup runs/tiny/lr3e-3/hf/step00000592 runs/tiny/lr3e-3/hf/step00000640

    Example: python -m ckpt_tools average runs/tiny/lr3e-3/lawa --window 5 runs/tiny/lr3e-3/hf/step*
    """
    from ckpt_tools.averaging.average import average_models, rebuild

    if from_lineage:
        if inputs or weights or decay is not None or window or dtype:
            raise UserError("--from-lineage says everything itself; leave out inputs and the other options")
        rebuild(from_lineage, out, processes=processes)
        return
    if sum(option is not None for option in (weights, decay, window)) > 1:
        raise UserError("--weights, --decay and --window are three kinds of average; give one of them")
    average_models(
        out,
        inputs or [],
        weights=weights,
        decay=decay,
        window=window,
        accumulate=accumulate.value,
        dtype=dtype and dtype.value,
        processes=processes,
    )


@app.command()
def trajectory(
    place: Annotated[str, typer.Argument(help="repository of the hub, or a local directory of revisions")],
    every: Annotated[int | None, typer.Option(min=1, help="each N-th revision of a stage, and its last")] = None,
    stage: Annotated[str | None, typer.Option(help="of this stage only, such as stage2")] = None,
    family: Annotated[
        str | None, typer.Option(help="repository whose naming and schedule a local directory has")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV to write")] = None,
) -> None:
    """Print and save the trajectory of a released model: steps, tokens and learning rate of its revisions.

    Example: python -m ckpt_tools trajectory allenai/OLMo-2-1124-7B --every 20 --stage stage1
    """
    from ckpt_tools.released.trajectory import show

    show(place, every=every, stage=stage, family=family, out=out)


@app.command()
def download(
    place: Annotated[str, typer.Argument(help="repository of the hub, or a local directory of revisions")],
    into: Annotated[Path, typer.Argument(help="directory that takes one HF directory per revision")],
    revisions: Annotated[list[str] | None, typer.Option("--revision", help="one to fetch; repeat for several")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="each N-th revision of a stage, and its last")] = None,
    stage: Annotated[str | None, typer.Option(help="of this stage only, such as stage2")] = None,
    family: Annotated[str | None, typer.Option(help="repository whose naming a local directory has")] = None,
    verify_hashes: Annotated[bool, typer.Option("--verify", help="hash what is there already")] = False,
) -> None:
    """Fetch revisions of a released model; goes on where it was stopped.

    Example: python -m ckpt_tools download allenai/OLMo-2-0425-1B models/olmo2-1b --every 20 --stage stage1
    """
    from ckpt_tools.released.download import download as fetch

    fetch(place, into, every=every, stage=stage, family=family, revisions=revisions or [], verify=verify_hashes)


@app.command()
def tokenizer(
    repo: Annotated[str, typer.Argument(help="repository of the hub, or a directory")],
    out: Annotated[Path, typer.Argument(help="directory to write")],
) -> None:
    """Fetch the tokenizer of a model, without its weights.

    Example: python -m ckpt_tools tokenizer allenai/OLMo-2-1124-7B runs/texts/allenai--OLMo-2-1124-7B
    """
    from ckpt_tools.released.tokenizer import fetch_tokenizer

    fetch_tokenizer(repo, out)
    typer.echo(str(out))


@app.command()
def publish(
    run_dir: Annotated[Path, typer.Argument(help="run whose exports lie in RUN_DIR/hf")],
    out: Annotated[Path, typer.Argument(help="directory to write")],
    stage: Annotated[int, typer.Option(min=1, help="number in the names: stage1-step1000-tokens5B")] = 1,
    copy: Annotated[bool, typer.Option(help="copy files instead of linking them")] = False,
    licence: Annotated[str, typer.Option("--license", help="for the model cards")] = "other",
) -> None:
    """Lay out a run's exports for publishing: names in OLMo's style, an index of the trajectory, model cards.

    Example: python -m ckpt_tools publish runs/tiny/lr3e-3 published/lr3e-3
    """
    from ckpt_tools.publishing.publish import publish as lay_out

    lay_out(run_dir, out, stage=stage, copy=copy, license=licence)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="checkpoint, HF directory or run directory")],
    keys: Annotated[bool, typer.Option(help="list every key")] = True,
    hashes: Annotated[bool, typer.Option(help="check every file's hash")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what a checkpoint or HF directory is: step, layout, keys, shapes, hashes, and what made it.

    Example: python -m ckpt_tools inspect runs/tiny/lr3e-3/checkpoints/step00000640
    """
    from ckpt_tools.inspecting.inspection import inspect as describe

    describe(path, keys=keys, hashes=hashes, as_json=as_json)


if __name__ == "__main__":
    run_command(app, "ckpt_tools")
