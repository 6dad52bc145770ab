"""python -m study: an ablation from its recipe to its report."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from study.choosing import (
    Every,
    Family,
    Name,
    Profile,
    Root,
    Settings,
    Source,
    Stage,
    StudyName,
    Text,
    TextCommand,
    TokenizerDirectory,
    asked_of,
    existing,
    released_of,
    wanted,
)
from study.run_configurations import write_run_configurations
from study.settings import save_study
from study.text_commands import corpus, tokenizer_
from study.tracking.commands import create_store, export_mlflow, mirror
from train.command import UserError, run_command
from train.flops import GPUS

DEFAULT_GPU = "h100"
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.command("list")
def list_() -> None:
    """List the recipes, their profiles, and what training the full ones takes.

    Example: python -m study list
    """
    from study.recipes.shown import listed

    for line in listed():
        typer.echo(line)


@app.command(cls=TextCommand)
def show(
    name: Name,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    source: Source = None,
    every: Every = None,
    stage: Stage = None,
    family: Family = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="say what so many GPUs take, how long, and what it leaves on disk")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help=f"their kind: {', '.join(GPUS)}", show_default=DEFAULT_GPU)] = None,
) -> None:
    """Show what a recipe trains and measures, its sources, and every command it consists of.

    Example: python -m study show tiny --profile smoke

    Example: python -m study show olmo2-190m-lr --gpus 8 --gpu h100

    Example: python -m study show trajectory --source allenai/OLMo-2-1124-7B --every 20
    """
    from study.commands import shown
    from study.estimate import estimate_lines
    from study.hardware import Hardware, planned
    from study.needs import Needs
    from study.recipes.shown import summary
    from study.steps import steps_of

    if gpu is not None and gpus is None:
        raise UserError(f"--gpu {gpu} says which GPUs; say with --gpus how many")
    study = wanted(name, root, profile, settings, released_of(source, every, stage, family), asked_of(text, tokenizer))
    hardware = Hardware(1) if gpus is None else planned(gpus, gpu or DEFAULT_GPU, gpus)
    needs = Needs(study, hardware, root / study.name)
    estimates = list(estimate_lines(needs)) if gpus else []  # refused before anything is shown
    for line in (*summary(study), *estimates):
        typer.echo(line)
    for step in steps_of(study):
        typer.echo(f"{step.name}: {shown(step.command, needs.machine(step))}")


@app.command(cls=TextCommand)
def run(
    name: Name,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    workers: Annotated[int, typer.Option(min=1, help="cores to use; a training run takes one per rank")] = (
        len(os.sched_getaffinity(0))
    ),
    source: Source = None,
    every: Every = None,
    stage: Stage = None,
    family: Family = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: what the recipe is sized for; 'tiny' and smoke profiles: cpu")
    ] = "auto",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use, by default all that CUDA_VISIBLE_DEVICES leaves")
    ] = None,
) -> None:
    """Run a study, or resume it: only what is missing or changed is done.

    Every step has GPUs of its own: a training as many as its layout takes, a measurement one, or as few as hold it.

    Example: python -m study run tiny --root runs --profile smoke

    Example: python -m study run olmo2-190m-lr --gpus 8

    Example: python -m study run tiny --set engine=deepspeed --set zero.stage=2

    Example: python -m study run olmo2-30m-lr --text corpus/*.jsonl.zst --tokenizer tokenizers/olmo2

    Example: python -m study run trajectory --source allenai/OLMo-2-1124-7B --every 20 --stage stage1
    """
    from study.hardware import this_machine
    from study.needs import Needs
    from study.report import REPORT
    from study.room import check_room
    from study.runner import Runner, StepError, locked
    from study.steps import steps_of
    from study.text_steps import check_text
    from study.tracking.store import opening, tracking_uri

    study = wanted(name, root, profile, settings, released_of(source, every, stage, family), asked_of(text, tokenizer))
    hardware = this_machine(device, gpus, workers, sized_for=study.sized_for)
    directory = root / study.name
    needs = Needs(study, hardware, directory)
    layouts = {name: training.run for name, training in needs.trainings.items()} if hardware.gpus else None
    check_text(study, directory)
    check_room(study, root, reserve_gb=0.0)
    typer.echo(f"{study.name} on {hardware}", err=True)
    try:
        with locked(directory) as lock_fd:
            write_run_configurations(directory, study, layouts)
            save_study(directory, study)
            hardware.record(directory)
            Runner(directory, steps_of(study), hardware, lock_fd, needs.machine).run()
    except StepError as failure:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from here", file=sys.stderr)
        raise typer.Exit(130) from None
    typer.echo(f"report: {(directory / REPORT).absolute()}")
    typer.echo(f"MLflow: {opening(root, tracking_uri(root))}")


@app.command(cls=TextCommand)
def status(
    name: StudyName,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
) -> None:
    """Show which steps of a study are complete.

    Example: python -m study status tiny --root runs
    """
    from study.ledger import Ledger
    from study.steps import steps_of

    directory, study = existing(name, root, profile, settings, asked_of(text, tokenizer))
    steps = steps_of(study)
    complete = Ledger(directory, steps).complete_steps()
    kinds = list(dict.fromkeys(step.kind for step in steps))
    for kind in kinds:
        names = [step.name for step in steps if step.kind == kind]
        open_ = [name for name in names if name not in complete]
        next_ = f"  next: {open_[0]}" if open_ else ""
        typer.echo(f"{kind:10} {len(names) - len(open_)}/{len(names)}{next_}")
    typer.echo(f"{len(complete)}/{len(steps)} steps complete in {directory}")


@app.command(cls=TextCommand)
def collect(
    name: StudyName,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
) -> None:
    """Write table.parquet: a row per run and checkpoint, of all that is measured by now.

    Example: python -m study collect tiny --root runs
    """
    from study.collect import collect_rows, write_table

    directory, study = existing(name, root, profile, settings, asked_of(text, tokenizer))
    collected = collect_rows(directory, study)
    if not collected.rows:
        raise UserError(f"{directory} holds no checkpoint yet; run 'python -m study run {name} --root {root}' first")
    path = write_table(directory, study, collected.rows)
    typer.echo(f"{path}: {len(collected.rows)} rows, {collected.found} of {collected.expected} results")


@app.command(cls=TextCommand)
def report(
    name: StudyName,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
) -> None:
    """Draw the figures and write report.html from table.parquet.

    Example: python -m study report tiny --root runs
    """
    from study.report import write_report

    directory, study = existing(name, root, profile, settings, asked_of(text, tokenizer))
    typer.echo(str(write_report(directory, study)))


@app.command(cls=TextCommand)
def claims(
    name: StudyName,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
) -> None:
    """Say of each claim of the paper whether table.parquet and the results support it, with the statistic.

    Example: python -m study claims tiny --root runs
    """
    from study.claims.page import claims_text
    from study.collect import read_table
    from study.paired import Paired

    directory, study = existing(name, root, profile, settings, asked_of(text, tokenizer))
    typer.echo(claims_text(study, read_table(directory, study), Paired(directory)))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="directory of a study")],
    second: Annotated[Path, typer.Argument(help="directory of another one, or of the same at another place")],
    out: Annotated[Path | None, typer.Option(help="HTML file that takes the page with its figures")] = None,
) -> None:
    """Put two studies side by side: settings that differ, matched runs, differences paired over documents.

    Example: python -m study compare runs/tiny runs/tiny-engine=deepspeed --out compared.html
    """
    from study.side_by_side import compare as compare_sides
    from study.side_by_side import open_sides
    from study.side_by_side_page import text_of, write_page

    sides = open_sides(first, second)
    tables = compare_sides(*sides)
    typer.echo(text_of(tables))
    if out:
        write_page(*sides, tables, out)
        typer.echo(str(out))


@app.command()
def blocks(
    results: Annotated[list[Path], typer.Argument(help="result.json of 'quant_eval run --per-block', or directories")],
    out: Annotated[Path, typer.Option(help="PNG file that takes the figure")],
) -> None:
    """Draw what each decoder block adds to the cost of quantization: a line per result, named by its run and step.

    Example: python -m study blocks runs/tiny/lr*/hf/step00000640/blocks/gptq-b3-g32 --out blocks.png
    """
    from study.blocks import draw_results

    draw_results(results, out)
    typer.echo(str(out))


app.command()(corpus)
app.command("tokenizer")(tokenizer_)
app.command(cls=TextCommand)(mirror)
app.command("create-store")(create_store)
app.command("export-mlflow")(export_mlflow)

if __name__ == "__main__":
    run_command(app, "study")
