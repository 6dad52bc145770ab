"""python -m study: an ablation from its recipe to its report."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from study.recipes import RECIPES, resolve
from study.settings import Study, load_study, save_study, write_run_configurations
from train.command import UserError, run_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Name = Annotated[str, typer.Argument(help="a recipe, see 'python -m study list'")]
StudyName = Annotated[str, typer.Argument(help="a study, the directory's name below the root")]
Root = Annotated[Path, typer.Option(help="directory of all studies and of the MLflow store")]
Profile = Annotated[str, typer.Option(help="'full', or 'smoke': the same study at a size a test can afford")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="key.path=value of run.json, for every run; stands in the study's name. Repeatable."),
]


def _existing(name: str, root: Path, profile: str, settings: list[str] | None) -> tuple[Path, Study]:
    """The directory and study of a name; a recipe's name means the study of that profile with those settings."""
    if name in RECIPES:
        directory = root / resolve(name, profile, tuple(settings or ())).name
    elif settings:
        raise UserError(f"--set belongs to a recipe ({', '.join(RECIPES)}); {name} is a study and has its settings")
    else:
        directory = root / name
    return directory, load_study(directory)


@app.command("list")
def list_() -> None:
    """List the recipes and their profiles.

    Example: python -m study list
    """
    for name, profiles in RECIPES.items():
        typer.echo(f"{name} ({', '.join(profiles)}): {resolve(name, 'full').description}")


@app.command()
def show(name: Name, profile: Profile = "full", settings: Settings = None) -> None:
    """Show what a recipe trains and measures, and every command it consists of.

    Example: python -m study show tiny --profile smoke
    """
    from study.steps import shown, steps_of

    study = resolve(name, profile, tuple(settings or ()))
    typer.echo(f"{study.name}: {study.description}")
    for run in study.runs:
        anneal = run.schedule.anneal
        annealed = f", linear anneal from step {anneal.start_step}" if anneal else ""
        typer.echo(
            f"  {run.name}: peak {run.optimizer.peak_lr:g}, {run.total_steps} steps of {run.tokens_per_step} tokens"
            f"{annealed}, {run.engine}, checkpoints at {', '.join(map(str, run.save_steps))}"
        )
    typer.echo(f"  quantized: {', '.join(study.quantization.specs)}; curvature: {study.curvature.pairs} probe pairs")
    if study.quantization.methods:
        typer.echo(f"  quantized at the end of training: {', '.join(study.quantization.methods)}")
    if study.quantization.by_block:
        typer.echo(f"  block by block at the end of training: {', '.join(study.quantization.by_block)}")
    averages = dict.fromkeys(average.name for run in study.runs for average in run.averages)
    if averages and study.averaged_steps:
        typer.echo(f"  averages quantized: {', '.join(averages)} at {', '.join(map(str, study.averaged_steps))}")
    for soup in study.soups:
        typer.echo(f"  {soup.name}: the mean of the checkpoints at {', '.join(map(str, soup.steps))}, quantized")
    for step in steps_of(study):
        typer.echo(f"{step.name}: {shown(step.command)}")


@app.command()
def run(
    name: Name,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    workers: Annotated[int, typer.Option(min=1, help="cores to use; a training run takes one per rank")] = (
        len(os.sched_getaffinity(0))
    ),
) -> None:
    """Run a study, or go on with it: only what is missing or changed is done.

    Example: python -m study run tiny --root runs --profile smoke

    Example: python -m study run tiny --set engine=deepspeed --set zero.stage=2
    """
    from study.mlflow_mirror import server_command
    from study.report import REPORT
    from study.runner import Runner, StepError, locked
    from study.steps import steps_of

    study = resolve(name, profile, tuple(settings or ()))
    directory = root / study.name
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
    typer.echo(f"MLflow: {server_command(root)}")


@app.command()
def status(name: StudyName, root: Root = Path("runs"), profile: Profile = "full", settings: Settings = None) -> None:
    """Show which steps of a study are complete.

    Example: python -m study status tiny --root runs
    """
    from study.ledger import Ledger
    from study.steps import steps_of

    directory, study = _existing(name, root, profile, settings)
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

    directory, study = _existing(name, root, profile, settings)
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

    directory, study = _existing(name, root, profile, settings)
    typer.echo(str(write_report(directory, study)))


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
def mirror(name: StudyName, root: Root = Path("runs"), profile: Profile = "full", settings: Settings = None) -> None:
    """Bring ROOT/mlflow.db up to table.parquet and the runs' metrics; may be repeated at any time.

    Example: python -m study mirror tiny --root runs
    """
    from study.mlflow_mirror import mirror as mirror_study
    from study.mlflow_mirror import server_command

    directory, study = _existing(name, root, profile, settings)
    done = mirror_study(directory, study)
    typer.echo(f"{done['metrics']} metrics in {len(done['runs'])} runs, {done['metrics_added']} of them new")
    typer.echo(f"open it with: {server_command(root)}")


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


if __name__ == "__main__":
    run_command(app, "study")
