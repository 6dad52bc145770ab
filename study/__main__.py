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
    existing,
    released_of,
    wanted,
)
from study.settings import save_study, write_run_configurations
from study.tracking.commands import create_store, export_mlflow, mirror
from train.command import UserError, run_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.command("list")
def list_() -> None:
    """List the recipes, their profiles, and what training the full ones takes.

    Example: python -m study list
    """
    from study.recipes.shown import listed

    for line in listed():
        typer.echo(line)


@app.command()
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
) -> None:
    """Show what a recipe trains and measures, its sources, and every command it consists of.

    Example: python -m study show tiny --profile smoke

    Example: python -m study show trajectory --source allenai/OLMo-2-1124-7B --every 20
    """
    from study.commands import here, shown
    from study.recipes.shown import summary
    from study.steps import steps_of

    study = wanted(name, root, profile, settings, released_of(source, every, stage, family, text))
    for line in summary(study):
        typer.echo(line)
    for step in steps_of(study):
        typer.echo(f"{step.name}: {shown(step.command, here(step))}")


@app.command()
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
) -> None:
    """Run a study, or go on with it: only what is missing or changed is done.

    Example: python -m study run tiny --root runs --profile smoke

    Example: python -m study run tiny --set engine=deepspeed --set zero.stage=2

    Example: python -m study run trajectory --source allenai/OLMo-2-1124-7B --every 20 --stage stage1
    """
    from study.report import REPORT
    from study.runner import Runner, StepError, locked
    from study.steps import steps_of
    from study.text_steps import check_text
    from study.tracking.store import opening, tracking_uri

    study = wanted(name, root, profile, settings, released_of(source, every, stage, family, text))
    directory = root / study.name
    check_text(study, directory)
    try:
        with locked(directory) as lock_fd:
            write_run_configurations(directory, study)
            save_study(directory, study)
            Runner(directory, steps_of(study), workers, lock_fd).run()
    except StepError as failure:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    typer.echo(f"report: {(directory / REPORT).absolute()}")
    typer.echo(f"MLflow: {opening(root, tracking_uri(root))}")


@app.command()
def status(name: StudyName, root: Root = Path("runs"), profile: Profile = "full", settings: Settings = None) -> None:
    """Show which steps of a study are complete.

    Example: python -m study status tiny --root runs
    """
    from study.ledger import Ledger
    from study.steps import steps_of

    directory, study = existing(name, root, profile, settings)
    steps = steps_of(study)
    complete = Ledger(directory, steps).complete_steps()
    kinds = list(dict.fromkeys(step.kind for step in steps))
    for kind in kinds:
        names = [step.name for step in steps if step.kind == kind]
        open_ = [name for name in names if name not in complete]
        next_ = f"  next: {open_[0]}" if open_ else ""
        typer.echo(f"{kind:10} {len(names) - len(open_)}/{len(names)}{next_}")
    typer.echo(f"{len(complete)}/{len(steps)} steps complete in {directory}")


@app.command()
def collect(name: StudyName, root: Root = Path("runs"), profile: Profile = "full", settings: Settings = None) -> None:
    """Write table.parquet: a row per run and checkpoint, of all that is measured by now.

    Example: python -m study collect tiny --root runs
    """
    from study.collect import collect_rows, write_table

    directory, study = existing(name, root, profile, settings)
    collected = collect_rows(directory, study)
    if not collected.rows:
        raise UserError(f"{directory} holds no checkpoint yet; run 'python -m study run {name} --root {root}' first")
    path = write_table(directory, study, collected.rows)
    typer.echo(f"{path}: {len(collected.rows)} rows, {collected.found} of {collected.expected} results")


@app.command()
def report(name: StudyName, root: Root = Path("runs"), profile: Profile = "full", settings: Settings = None) -> None:
    """Draw the figures and write report.html from table.parquet.

    Example: python -m study report tiny --root runs
    """
    from study.report import write_report

    directory, study = existing(name, root, profile, settings)
    typer.echo(str(write_report(directory, study)))


@app.command()
def claims(name: StudyName, root: Root = Path("runs"), profile: Profile = "full", settings: Settings = None) -> None:
    """Say of each claim of the paper whether table.parquet and the results support it, with the statistic.

    Example: python -m study claims tiny --root runs
    """
    from study.claims.page import claims_text
    from study.collect import read_table
    from study.paired import Paired

    directory, study = existing(name, root, profile, settings)
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


@app.command()
def corpus(
    out: Annotated[Path, typer.Argument(help="directory that receives text and tokenizer")],
    vocab_size: Annotated[int, typer.Option(min=257, help="tokens of the byte-level BPE")] = 2048,
    held_out_percent: Annotated[int, typer.Option(min=1, max=99, help="share of the files kept for measuring")] = 5,
    held_out_characters: Annotated[int, typer.Option(min=1, help="kept of each held-out file")] = 4096,
) -> None:
    """Make text and a tokenizer from the source of the running interpreter's standard library.

    Example: python -m study corpus runs/tiny/data/corpus --vocab-size 2048
    """
    from study.corpus import build_corpus

    files = build_corpus(
        out, vocab_size=vocab_size, held_out_percent=held_out_percent, held_out_characters=held_out_characters
    )
    typer.echo(f"{out}: {files['train']} training files, {files['held_out']} held out")


app.command()(mirror)
app.command("create-store")(create_store)
app.command("export-mlflow")(export_mlflow)

if __name__ == "__main__":
    run_command(app, "study")
