"""The commands on what trainings teach: forecasts, choices, and studies beside each other.

Bodies import what they need: every `python -m study` imports this file for its help.
"""

from pathlib import Path
from typing import Annotated

import typer

from base.errors import UserError
from base.names import take_one_of
from study.choosing import Every, Root, StudyName, existing


def forecast(
    name: StudyName,
    root: Root = Path("runs"),
    run: Annotated[
        str | None, typer.Option(help="a run of the study", show_default="all with a stable phase")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="STUDY", help="whose cooldowns are learned from too"),
    ] = None,
    every: Every = False,
) -> None:
    """Show what each run would lose by quantization if it were annealed now.

    By the last measured checkpoint of its stable phase, and the cooldowns that other runs ended
    with. It trains and measures nothing.

    Example: python -m study forecast olmo2-30m-lr --run lr3e-3 --from tiny
    """
    from dynamics.forecast.page import MeasuredStudy, forecast_lines, forecast_runs, projections
    from study.results.collect import diverged_runs, left_out_lines

    source = MeasuredStudy.read(*existing(name, root))
    learned = [MeasuredStudy.read(*existing(other, root)) for other in others or ()]
    diverged = diverged_runs(source.directory, source.study)
    runs = [each for each in forecast_runs(source.study) if each.name not in diverged]
    if run is not None:
        names = [each.name for each in source.study.runs]
        if run not in names:
            raise UserError(f"{name} has no run {run}; {take_one_of(run, names)}")
        # A run that is named is forecast even where it has no stable phase of its own.
        runs = [each for each in source.study.runs if each.name == run]
    lines = forecast_lines(source, learned, projections(source, learned, runs), whole=every)
    typer.echo("\n".join([*lines, *left_out_lines(source.directory, source.study)]))


def choose(
    name: StudyName,
    root: Root = Path("runs"),
    loss: Annotated[
        float | None,
        typer.Option(
            help="full-precision loss in nats per token at which errors are compared",
            show_default="the lowest that all runs reach",
        ),
    ] = None,
    every: Every = False,
) -> None:
    """Rank peak learning rates and other arms by quantization error and quantized loss.

    The error is compared at equal loss, the quantized loss at equal tokens and at equal training
    FLOPs. Other arms differ in optimizer, anneal or perturbation.

    Example: python -m study choose tiny --root runs
    """
    from dynamics.choices.arms import answers, answers_lines
    from study.claims.verdict import Evidence
    from study.results.collect import left_out_lines
    from study.results.paired import Paired
    from study.results.table import read_table

    directory, study = existing(name, root)
    evidence = Evidence(study, read_table(directory, study), Paired(directory))
    lines = answers_lines(answers(evidence, loss), whole=every)
    typer.echo("\n".join([*lines, *left_out_lines(directory, study)]))


def cooldowns(
    name: StudyName,
    runs: Annotated[list[str], typer.Argument(help="runs of it, no branches")],
    steps: Annotated[
        str, typer.Option(metavar="S1,S2,...", help="checkpoints that the cooldowns start from")
    ],
    length: Annotated[
        int | None,
        typer.Option(min=2, help="steps of each", show_default="a tenth of those before it"),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="a recipe to write, for 'python -m study run'"),
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Show the cost of annealing a run from several of its checkpoints; train nothing.

    With --write also leave a recipe of the same study with these branches beside its runs.

    Example: python -m study cooldowns mine lr1e-3 --steps 2000,4000,8000 --write more.py
    """
    from dynamics.choices.cooldowns import cost, with_cooldowns, write_recipe

    _, study = existing(name, root)
    starts = _steps(steps)
    for line in cost(study, with_cooldowns(study, runs, starts, length)):
        typer.echo(line)
    if write:
        write_recipe(write, root, study, runs, starts, length)
        typer.echo(f"python -m study run {write} --root {root}")


def choose_average(
    name: StudyName,
    run: Annotated[str, typer.Argument(help="a run of it whose checkpoints are exported")],
    spec: Annotated[
        str | None,
        typer.Option(help="what to quantize with", show_default="the study's of fewest bits"),
    ] = None,
    last: Annotated[int, typer.Option(min=2, help="exports, the last ones, to average")] = 5,
    measure: Annotated[
        bool, typer.Option("--measure", help="search; without it the cost is shown alone")
    ] = False,
    root: Root = Path("runs"),
) -> None:
    """Choose the LAWA window or the soup of a run with the lowest quantized loss.

    The search sees one half of the held-out documents; the pick is compared with the last weights
    on the other. All is written to STUDY/choices/RUN.

    Example: python -m study choose-average tiny lr1e-3 --measure
    """
    from dynamics.choices.average import Bench, pick_lines
    from study.results.averages import lowest_spec

    directory, study = existing(name, root)
    trained_run = next((each for each in study.trained if each.name == run), None)
    if trained_run is None:
        names = [each.name for each in study.trained]
        raise UserError(f"{name} trains no run {run}; {take_one_of(run, names)}")
    bench = Bench(directory, study, trained_run, spec or lowest_spec(study), last)
    typer.echo(bench.cost())
    if measure:
        for line in pick_lines(bench.pick()):
            typer.echo(line)


def _steps(text: str) -> list[int]:
    """Return the steps of '320,448'; UserError for any other text."""
    try:
        return sorted({int(step) for step in text.split(",")})
    except ValueError:
        raise UserError(f"--steps {text} are not steps; give them as 320,448") from None


def compare(
    names: Annotated[list[str], typer.Argument(help="studies below the root, of any size")],
    root: Root = Path("runs"),
    out: Annotated[
        Path | None, typer.Option(help="directory to write", show_default="ROOT/compared")
    ] = None,
) -> None:
    """Put the ends of training of several studies into one table, and fit their scaling.

    A row has the size of the model, tokens, engine and seed. The figure draws each error against
    the size, with a power law in parameters N and tokens per parameter D/N from 3 sizes on.

    Example: python -m study compare olmo2-30m-lr olmo2-190m-lr olmo2-1b-lr
    """
    from dynamics.across import write_comparison

    studies = dict(existing(name, root) for name in names)
    for line in write_comparison(studies, out or root / "compared"):
        typer.echo(line)
