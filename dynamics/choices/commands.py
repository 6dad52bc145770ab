"""The commands that choose for a user."""

from pathlib import Path
from typing import Annotated

import typer

from base.errors import UserError
from base.names import take_one_of
from study.choosing import Root, StudyName, existing


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
) -> None:
    """Rank peak learning rates by quantization error at equal loss, and by quantized loss.

    Example: python -m study choose tiny --root runs
    """
    from dynamics.choices.learning_rate import answers
    from dynamics.choices.text import answers_text
    from dynamics.claims.verdict import Evidence
    from study.results.diverged import left_out_lines
    from study.results.paired import Paired
    from study.results.table import read_table

    directory, study = existing(name, root)
    evidence = Evidence(study, read_table(directory, study), Paired(directory))
    lines = [answers_text(answers(evidence, loss)), *left_out_lines(directory, study)]
    typer.echo("\n".join(lines))


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
