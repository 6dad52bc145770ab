"""python -m study: an ablation from its recipe to its report."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from base.cli import command_group, run_command
from base.errors import UserError
from base.frozen import MOST_SECONDS
from study.choosing import (
    Every,
    Key,
    Name,
    Profile,
    Root,
    Settings,
    StudyName,
    Text,
    TextCommand,
    TokenizerDirectory,
    existing,
    study_of,
)
from study.content import loaded
from study.definition import save_study
from study.paths import REPORT
from train.planning.flops import GPUS

DEFAULT_GPU = "h100"
NICENESS = 10  # of a refresh beside the steps: a core that one wants is that step's
# Commands and options, and what other programs call them.
SYNONYMS = {
    "run": "start launch begin execute resume continue restart train new measure quantize evaluate",
    "list": "recipes ls studies",
    "show": "info describe details plan",
    "status": "progress state",
    "report": "plot plots figure figures html table results claims",
    "mirror": "mlflow track",
    "compare": "diff",
    "--set": "seed seeds lr peak-lr steps batch-size engine layers",
    "--profile": "smoke size",
    "--root": "dir out output",
}
app = command_group(__doc__)


@app.command("list")
def list_(every: Every = False) -> None:
    """List the recipes, and what training the full ones takes.

    Example: python -m study list
    """
    from study.recipes.shown import recipe_lines

    typer.echo("\n".join(recipe_lines(whole=every)))


@app.command(cls=TextCommand)
def show(
    name: Name,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    key: Key = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="say what so many GPUs take, and how long"),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"their kind: {', '.join(GPUS)}", show_default=DEFAULT_GPU)
    ] = None,
    every: Every = False,
) -> None:
    """Show what a recipe trains and measures, and what it takes, on one screen.

    Without --gpus it is GPU-hours on as few GPUs as each run is laid out for; of a study that is
    sized for the CPU, core-hours.

    Example: python -m study show olmo2-190m-lr --gpus 8 --gpu h100
    """
    study = study_of(name, root, profile, settings, text, tokenizer, key)

    from base.aligned import wrapped
    from study.machine.estimate import core_lines, disk_line, estimate_lines, price_lines
    from study.machine.hardware import Hardware, kind_named, planned
    from study.machine.needs import Needs
    from study.machine.prices import Prices
    from study.recipes.shown import heading, source_lines, summary
    from study.step import shown
    from study.steps import steps_of

    kind = kind_named(gpu or DEFAULT_GPU)
    hardware = Hardware(1) if gpus is None else planned(gpus, kind, gpus)
    needs, steps = Needs(study, hardware), steps_of(study)
    on_cpu = study.sized_for == "cpu" and gpus is None and gpu is None
    prices = Prices(needs, steps, kind)
    costs = core_lines(steps, whole=every) if on_cpu else price_lines(prices, whole=every)
    # Refused before anything is shown.
    layouts = list(estimate_lines(needs, whole=every)) if gpus else []

    takes = [line for text in (*costs, *layouts, disk_line(needs)) for line in wrapped(text)]
    lines = [*heading(study), *takes, "", *summary(study, whole=every)]
    if every:
        lines += source_lines(study)
        lines += [f"{step.name}: {shown(step.command, needs.machine(step))}" for step in steps]
    else:
        lines.append(
            f"--all adds the {len(steps)} steps by kind and by command, settings in full, sources"
        )
    typer.echo("\n".join(lines))


@app.command(cls=TextCommand)
def run(
    name: Name,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    key: Key = None,
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

    Example: python -m study run tiny --profile smoke --set engine=deepspeed

    Example: python -m study run olmo2-30m-lr --text corpus/*.jsonl.zst --gpus 8
    """
    study = study_of(name, root, profile, settings, text, tokenizer, key)

    from study.machine.disk import check_room
    from study.machine.hardware import this_machine
    from study.machine.measurable import check_measurable
    from study.machine.needs import Needs, write_run_configurations
    from study.pipeline.ledger import left_out_words
    from study.pipeline.runner import Runner, StepError, locked
    from study.steps import refresh_command, steps_of
    from study.text.steps import check_documents_of, check_text
    from study.tracking.store import opening, tracking_uri

    # The cores that this process may use, which a container or taskset may limit.
    cores = len(os.sched_getaffinity(0))
    hardware = this_machine(device, gpus, cores, sized_for=study.sized_for)
    directory = root / study.name
    needs = Needs(study, hardware)
    layouts = {name: training.run for name, training in needs.trainings.items()}
    check_text(study, directory)
    check_documents_of(study, directory)
    check_measurable(study)
    check_room(study, root, at_once=needs.at_once)
    uri = tracking_uri(root)

    typer.echo(f"{study.name} on {hardware}", err=True)
    try:
        # All that changes the study comes under the lock: another runner may be at work.
        with locked(directory) as lock_fd:
            write_run_configurations(directory, study, layouts if hardware.gpus else None)
            save_study(directory, study)
            hardware.record(directory)
            steps, live = steps_of(study), refresh_command(study)
            runner = Runner(directory, steps, hardware, lock_fd, needs.machine, live)
            runner.run()
    except StepError as failure:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command resumes from here", err=True)
        raise typer.Exit(130) from None
    reasons = list(runner.left_out.values())
    beside = f", {left_out_words(reasons)}" if reasons else ""
    typer.echo(f"{len(runner.complete)}/{len(steps)} steps complete{beside}")
    typer.echo(f"MLflow: {opening(directory, uri)}")
    typer.echo(f"report: {(directory / REPORT).absolute()}")


@app.command()
def status(
    name: StudyName,
    root: Root = Path("runs"),
    every: Every = False,
) -> None:
    """Show which steps of a study are complete, why the next of each kind is not, and trainings.

    Example: python -m study status tiny --root runs
    """
    from study.pipeline.ledger import Ledger, status_lines
    from study.steps import steps_of
    from study.trainings import progress_lines

    directory, study = existing(name, root)
    ledger = Ledger(directory, steps_of(study))
    lines = [
        *status_lines(ledger, whole=every),
        *progress_lines(directory, study, whole=every),
    ]
    typer.echo("\n".join(lines))


@app.command(hidden=True)
def collect(
    name: StudyName,
    root: Root = Path("runs"),
) -> None:
    """Write table.parquet: a row per run and checkpoint, of all that is measured by now.

    Example: python -m study collect tiny --root runs
    """
    from study.results.collect import collect_rows, left_out_lines
    from study.results.table import write_table

    directory, study = existing(name, root)
    collected = collect_rows(directory, study)
    if not collected.rows:
        raise UserError(f"{directory} holds no checkpoint yet; start 'python -m study run' first")
    path = write_table(directory, study, collected.rows)
    typer.echo(
        f"{path}: {len(collected.rows)} rows, {collected.num_found} of {collected.expected} results"
    )
    for line in left_out_lines(directory, study):
        typer.echo(line)


@app.command()
def report(
    name: StudyName,
    root: Root = Path("runs"),
    claims: Annotated[
        bool,
        typer.Option(
            "--claims", help="print verdicts on claims and effects of factors, write no report"
        ),
    ] = False,
    every: Every = False,
    figure: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="draw this figure alone, as PDF, SVG, PNG and CSV"),
    ] = None,
) -> None:
    """Draw the figures and write report.html from table.parquet.

    Example: python -m study report tiny --claims

    Example: python -m study report tiny --figure kl_divergence
    """
    directory, study = existing(name, root)
    if every and not claims:
        raise UserError("--all belongs to --claims: report.html has everything")
    if figure is not None:
        from study.report.report import draw_alone

        typer.echo("\n".join(draw_alone(directory, study, figure)))
        return

    if claims:
        from study.report.text import report_lines

        typer.echo("\n".join(report_lines(directory, study, whole=every)))
        return

    from study.report.report import write_report

    typer.echo(str(write_report(directory, study)))


@app.command(hidden=True)
def corpus(
    out: Annotated[Path, typer.Argument(help="directory that receives text and tokenizer")],
    vocab_size: Annotated[int, typer.Argument(min=257, help="tokens of the byte-level BPE")],
    packages: Annotated[list[str], typer.Argument(help="installed, as study.json names them")],
) -> None:
    """Make text and a tokenizer from the source of pinned packages.

    Example: python -m study corpus runs/tiny/data/corpus 2048 mpmath==1.3.0#sha256=HASH
    """
    from study.text.package_sources import build_corpus

    build_corpus(out, vocab_size, packages)
    typer.echo(str(out))


@app.command()
def tokenizer(
    sources: Annotated[
        list[Path], typer.Argument(help="files of text, as 'python -m train prepare' takes them")
    ],
    out: Annotated[Path, typer.Option(help="directory to write")],
    vocab_size: Annotated[int, typer.Option(min=257, help="tokens of the byte-level BPE")],
    share: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-STOP", help="of the documents, as 'python -m train prepare' takes it"
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(help="key of a line, or column of a table, that holds the text")
    ] = "text",
) -> None:
    """Train a tokenizer on text, on its first GiB.

    Example: python -m study tokenizer books.jsonl --vocab-size 32768 --out tokenizers/books
    """
    from study.text.tokenizer import build_tokenizer
    from train.data.documents import TextFile
    from train.data.manifest import EVERYTHING, parse_share

    files = [TextFile(path=path, key=key) for path in sources]
    parsed = parse_share(share) if share else EVERYTHING
    build_tokenizer(files, out, vocab_size=vocab_size, share=parsed)
    typer.echo(str(out))


@app.command(hidden=True)
def refresh(name: StudyName, root: Root = Path("runs")) -> None:
    """Bring table, report and MLflow up to what is measured by now, at low priority.

    'study run' does so now and then while its steps work. MLflow has the measurements of a run in
    the order of its models, up to the first of which one is still missing.

    Example: python -m study refresh tiny --root runs
    """
    from study.report.report import write_report
    from study.results.collect import collect_rows
    from study.results.table import write_table
    from study.tracking.importer import mirror
    from study.tracking.store import tracking_uri

    os.nice(NICENESS)
    directory, study = existing(name, root)
    collected = collect_rows(directory, study)
    if collected.rows:
        write_table(directory, study, collected.rows)
        write_report(directory, study)
    # Settled rows alone: MLflow takes none back, so later ones would make the run anew.
    mirror(directory, study, tracking_uri(root), collected.settled)
    typer.echo(f"{directory}: {collected.num_found} of {collected.expected} results")


@app.command()
def mirror(
    name: StudyName,
    root: Root = Path("runs"),
    run: Annotated[
        str | None, typer.Option(help="import this run's metrics alone, while it trains or after")
    ] = None,
    follow: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_SECONDS,
            help="with --run: again every so many seconds, until the run has ended",
        ),
    ] = None,
) -> None:
    """Bring MLflow up to the table and the runs' metrics; may be repeated and killed.

    It is that of MLFLOW_TRACKING_URI: sqlite:///FILE, postgresql+psycopg2://USER@HOST/DB or
    http(s)://; by default ROOT/mlflow.db. Passwords are read from ~/.pgpass or PGPASSWORD, and from
    ~/.netrc or MLFLOW_TRACKING_USERNAME and _PASSWORD.

    Example: python -m study mirror tiny --root runs

    Example: MLFLOW_TRACKING_URI=http://login:5000 python -m study mirror tiny --run lr3e-3
    --follow 60
    """
    from study.tracking import importer
    from study.tracking.store import opening, tracking_uri

    directory, study = existing(name, root)
    uri = tracking_uri(root)
    if run is None:
        if follow is not None:
            raise UserError("--follow needs --run: give the run that it follows")
        summary = importer.mirror(directory, study, uri)
        typer.echo(
            f"{summary['metrics']} metrics in {len(summary['runs'])} runs,"
            f" {summary['metrics_added']} of them new"
        )
        for of_run, lacking in summary["not_finite"].items():
            typer.echo(f"{of_run}: {lacking}")
    elif follow is not None:
        importer.follow(directory, study, run, uri, follow)
    else:
        typer.echo(f"{importer.mirror_run(directory, study, run, uri)} metrics of {run} were new")
    typer.echo(opening(directory, uri))


@app.command()
def power(
    name: StudyName,
    root: Root = Path("runs"),
    difference: Annotated[
        str, typer.Option(metavar="PERCENT%", help="to be decided, of the figure")
    ] = "10%",
    every: Every = False,
) -> None:
    """Show how many seeds, documents and calibration draws decide a difference, with 80% power.

    By the variances that the study's own comparisons over seeds show.

    Example: python -m study power tiny --difference 5%
    """
    from study.results.paired import Paired
    from study.results.power import power_lines
    from study.results.table import read_table

    directory, study = existing(name, root)
    if not re.fullmatch(r"\d*\.?\d+%", difference) or float(difference[:-1]) == 0:
        raise UserError(f"--difference {difference} is not a share above 0; write it as 10%")
    share = float(difference[:-1]) / 100
    rows = read_table(directory, study)
    lines = power_lines(study, rows, Paired(directory), share, whole=every)
    typer.echo("\n".join(lines))


for command in loaded("commands"):
    app.command()(command)

if __name__ == "__main__":
    run_command(app, "study", SYNONYMS)
