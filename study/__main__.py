"""python -m study: an ablation from its recipe to its report."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from base.cli import run_command
from base.errors import UserError
from study.choosing import (
    Name,
    Profile,
    Root,
    Settings,
    StudyName,
    Text,
    TextCommand,
    TokenizerDirectory,
    existing,
    wanted,
)
from study.definition import save_study
from study.machine.run_configurations import write_run_configurations
from study.text.commands import corpus, tokenizer_
from study.tracking.commands import mirror
from train.planning.flops import GPUS

DEFAULT_GPU = "h100"
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=__doc__,
)


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
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="say what so many GPUs take, how long, and what it leaves on disk"
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"their kind: {', '.join(GPUS)}", show_default=DEFAULT_GPU)
    ] = None,
) -> None:
    """Show what a recipe trains and measures, its sources, and every command it consists of.

    Example: python -m study show tiny --profile smoke

    Example: python -m study show olmo2-190m-lr --gpus 8 --gpu h100

    Example: python -m study show trajectory --set source=allenai/OLMo-2-1124-7B --set every=20
    """
    from study.machine.estimate import estimate_lines
    from study.machine.hardware import Hardware, planned
    from study.machine.needs import Needs
    from study.pipeline.step import shown
    from study.pipeline.steps import steps_of
    from study.recipes.shown import summary

    if gpu is not None and gpus is None:
        raise UserError(f"--gpu {gpu} says which GPUs; say with --gpus how many")
    study = wanted(name, root, profile, settings, text, tokenizer)
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
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, or auto: what the recipe is sized for; 'tiny' and smoke profiles: cpu"
        ),
    ] = "auto",
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs to use, by default all that CUDA_VISIBLE_DEVICES leaves"),
    ] = None,
) -> None:
    """Run a study, or resume it: only what is missing or changed is done.

    Every step has GPUs of its own: a training as many as its layout takes, a measurement one, or as
    few as hold it.

    Example: python -m study run tiny --root runs --profile smoke

    Example: python -m study run olmo2-190m-lr --gpus 8

    Example: python -m study run tiny --set engine=deepspeed --set zero.stage=2

    Example: python -m study run olmo2-30m-lr --text corpus/*.jsonl.zst --tokenizer tokenizers/olmo2

    Example: python -m study run trajectory --set source=allenai/OLMo-2-1124-7B --set every=20
    """
    from study.machine.disk import check_room
    from study.machine.hardware import this_machine
    from study.machine.needs import Needs
    from study.pipeline.locks import locked
    from study.pipeline.runner import Runner, StepError
    from study.pipeline.step import Step
    from study.pipeline.steps import steps_of
    from study.report.report import REPORT
    from study.text.steps import check_text
    from study.tracking.store import opening, tracking_uri

    study = wanted(name, root, profile, settings, text, tokenizer)
    cores = len(os.sched_getaffinity(0))
    hardware = this_machine(device, gpus, cores, sized_for=study.sized_for)
    directory = root / study.name
    needs = Needs(study, hardware, directory)
    runs = {name: training.run for name, training in needs.trainings.items()}
    layouts = runs if hardware.gpus else None
    check_text(study, directory)
    check_room(study, root)

    def has_room(step: Step) -> None:
        if step.kind == "train":
            check_room(study, root, only=step.run)

    typer.echo(f"{study.name} on {hardware}", err=True)
    try:
        with locked(directory) as lock_fd:
            write_run_configurations(directory, study, layouts)
            save_study(directory, study)
            hardware.record(directory)
            Runner(directory, steps_of(study), hardware, lock_fd, needs.machine, has_room).run()
    except StepError as failure:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from here", file=sys.stderr)
        raise typer.Exit(130) from None
    typer.echo(f"report: {(directory / REPORT).absolute()}")
    typer.echo(f"MLflow: {opening(root, tracking_uri(root))}")


@app.command()
def status(
    name: StudyName,
    root: Root = Path("runs"),
) -> None:
    """Show which steps of a study are complete, and why the next one of each kind is not.

    Example: python -m study status tiny --root runs
    """
    from study.pipeline.ledger import Ledger
    from study.pipeline.steps import steps_of

    directory, study = existing(name, root)
    steps = steps_of(study)
    ledger = Ledger(directory, steps)
    complete = ledger.complete_steps()
    for kind in dict.fromkeys(step.kind for step in steps):
        own = [step for step in steps if step.kind == kind]
        left = [step for step in own if step.name not in complete]
        line = f"{kind:10} {len(own) - len(left)}/{len(own)}"
        if left:
            awaited = next((name for name in left[0].after if name not in complete), None)
            why = f"waits for {awaited}" if awaited else ledger.reason(left[0])
            line += f"  next: {left[0].name}: {why}"
        typer.echo(line)
    typer.echo(f"{len(complete)}/{len(steps)} steps complete in {directory}")


@app.command(hidden=True)
def collect(
    name: StudyName,
    root: Root = Path("runs"),
) -> None:
    """Write table.parquet: a row per run and checkpoint, of all that is measured by now.

    Example: python -m study collect tiny --root runs
    """
    from study.results.collect import collect_rows
    from study.results.table import write_table

    directory, study = existing(name, root)
    collected = collect_rows(directory, study)
    if not collected.rows:
        raise UserError(
            f"{directory} holds no checkpoint yet; run 'python -m study run {name} --root {root}'"
            " first"
        )
    path = write_table(directory, study, collected.rows)
    typer.echo(
        f"{path}: {len(collected.rows)} rows, {collected.found} of {collected.expected} results"
    )


@app.command()
def report(
    name: StudyName,
    root: Root = Path("runs"),
    claims: Annotated[
        bool, typer.Option("--claims", help="print the verdict on each claim, write no report")
    ] = False,
) -> None:
    """Draw the figures and write report.html from table.parquet.

    Example: python -m study report tiny --root runs

    Example: python -m study report tiny --claims
    """
    directory, study = existing(name, root)
    if claims:
        from study.claims.page import claims_text, judge_all
        from study.results.paired import Paired
        from study.results.table import read_table

        judged = judge_all(study, read_table(directory, study), Paired(directory))
        typer.echo(claims_text(study, judged))
        return

    from study.report.report import write_report

    typer.echo(str(write_report(directory, study)))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="directory of a study")],
    second: Annotated[
        Path, typer.Argument(help="directory of another one, or of the same at another place")
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file that takes the page with its figures")
    ] = None,
) -> None:
    """Put two studies side by side: settings that differ, runs, and paired differences.

    Example: python -m study compare runs/tiny runs/tiny-engine=deepspeed --out compared.html
    """
    from study.report.side_by_side import compare as compare_sides
    from study.report.side_by_side import open_sides, text_of, write_page

    sides = open_sides(first, second)
    tables = compare_sides(*sides)
    typer.echo(text_of(tables))
    if out:
        write_page(*sides, tables, out)
        typer.echo(str(out))


app.command(hidden=True)(corpus)
app.command("tokenizer")(tokenizer_)
app.command()(mirror)

if __name__ == "__main__":
    run_command(app, "study")
