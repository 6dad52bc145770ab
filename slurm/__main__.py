"""python -m slurm: a study on a cluster, from its submission to its last element."""

from pathlib import Path
from typing import Annotated

import typer

from base.aligned import aligned
from base.cli import command_group, run_command
from base.errors import UserError
from base.frozen import MOST_SECONDS
from base.sharing import follow_root
from slurm.cluster import elements_text
from study.choosing import (
    Key,
    Name,
    Profile,
    Root,
    Settings,
    StudyName,
    Text,
    TextCommand,
    TokenizerDirectory,
    directory_of,
    study_of,
)
from study.definition import Study, load_study

# Commands and options, and what other programs call them.
SYNONYMS = {
    "submit": "start launch sbatch execute",
    "retry": "resume continue restart",
    "status": "queue squeue info show",
    "cancel": "stop kill abort scancel",
    "doctor": "check validate verify",
    "logs": "log tail",
}
app = command_group(__doc__)

All = Annotated[bool, typer.Option("--all", help="print all, however long")]
LINES = 200  # printed of the end of a log


@app.command(cls=TextCommand)
def submit(
    name: Name,
    site: Annotated[
        Path,
        typer.Option(help="TOML file that describes the cluster, see slurm/sites/example.toml"),
    ],
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    key: Key = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print every script; SLURM is not asked to check any")
    ] = False,
) -> None:
    """Submit a study, or what is missing of it: first what can start now, the rest once it can.

    Example: python -m slurm submit olmo2-7b-lr --site my_cluster.toml --dry-run

    Example: python -m slurm submit tiny --site my_cluster.toml --profile smoke --set
    engine=deepspeed
    """
    from slurm.site import load_site
    from slurm.submission import submit as submission

    cluster = load_site(site)
    study = study_of(name, Path(cluster.root), profile, settings, text, tokenizer, key)
    if dry_run:
        for script in submission.dry_run(study, cluster):
            typer.echo(script)
        typer.echo(submission.not_asked(study, cluster), err=True)
        return
    _report(study, Path(cluster.root) / study.name, submission.submit(study, cluster))


def _report(study: Study, study_dir: Path, submitted: dict[str, int]) -> None:
    """Print a line per array that was submitted, and the totals."""
    watch = f"python -m slurm status {study.name} --root {study_dir.parent}"
    if not submitted:
        typer.echo(
            f"nothing to submit: what can start is in the queue, complete or failed; see '{watch}'"
        )
        return
    typer.echo(
        f"{elements_text(sum(submitted.values()))} can start now, each job submits what comes after"
        f" it; watch with '{watch}'"
    )
    typer.echo("\n".join(aligned((name, elements_text(n)) for name, n in submitted.items())))


@app.command()
def status(
    name: StudyName,
    root: Root = Path("runs"),
    watch: Annotated[
        int | None,
        typer.Option(
            min=10,
            max=MOST_SECONDS,
            help="seconds: submit what can start and show again, until the end",
        ),
    ] = None,
    whole: All = False,
) -> None:
    """Show how far a study is: trainings, checkpoints, measurements, failures and their logs.

    With --watch it also submits what can start, as jobs do at their end: for sites whose nodes
    may not call sbatch.

    Example: python -m slurm status tiny --root /shared/studies

    Example: python -m slurm status tiny --root /shared/studies --watch 60
    """
    from slurm.status.overview import look
    from slurm.status.table import lines_of
    from slurm.status.table import watch as watch_study

    directory = directory_of(name, root)
    if watch:
        watch_study(directory, watch)
        return
    typer.echo("\n".join(lines_of(look(directory), whole=whole)))


@app.command()
def logs(
    name: StudyName,
    which: Annotated[
        str | None, typer.Argument(help="a step, an array or ARRAY/INDEX; default: list logs")
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """List the logs of what failed and what runs, or print the path and the end of one.

    Example: python -m slurm logs tiny

    Example: python -m slurm logs tiny quantize-1/3
    """
    from slurm.status.overview import last_lines, log_lines, newest_logs

    directory = directory_of(name, root)
    if which is None:
        typer.echo("\n".join(log_lines(directory)))
        return
    by_element = newest_logs(directory, which)
    if len(by_element) > 1:
        typer.echo("\n".join(f"{element} {log}" for element, log in by_element.items()))
        return
    (log,) = by_element.values()
    typer.echo(f"==> {log} <==", err=True)
    typer.echo(last_lines(log, LINES), nl=False)


@app.command()
def cancel(
    name: StudyName,
    which: Annotated[
        str | None, typer.Argument(help="a run or an array; default: everything")
    ] = None,
    root: Root = Path("runs"),
    after_checkpoint: Annotated[
        bool,
        typer.Option("--after-checkpoint", help="let running trainings save a checkpoint first"),
    ] = False,
) -> None:
    """Cancel what is queued or runs; files stay as they are, and `retry` resumes from them.

    Example: python -m slurm cancel tiny lr3e-3 --after-checkpoint
    """
    from slurm.submission.advance import cancel as cancel_elements

    directory = directory_of(name, root)
    cancelled, stopping, left = cancel_elements(directory, which, after_checkpoint=after_checkpoint)
    typer.echo(f"{elements_text(len(cancelled))} cancelled")
    for user in left:
        typer.echo(
            f"jobs of {user} are left: what waits leaves when it starts, what runs is not submitted"
            f" again; to end it now, have {user} run the same command"
        )
    for stopped in stopping:
        typer.echo(f"{stopped} stops after its next step, with a checkpoint")


@app.command()
def retry(
    name: StudyName,
    root: Root = Path("runs"),
    site: Annotated[
        Path | None, typer.Option(help="a site file that has changed since, and its root")
    ] = None,
) -> None:
    """Submit again what failed, was cancelled or never started.

    Example: python -m slurm retry tiny --site my_cluster.toml
    """
    from slurm.site import load_site
    from slurm.submission.record import existing_submission
    from slurm.submission.submit import submit as submit_study

    changed = load_site(site) if site else None
    directory = directory_of(name, Path(changed.root) if changed else root)
    cluster = changed or existing_submission(directory).site
    if directory.resolve() != (Path(cluster.root) / name).resolve():
        raise UserError(
            f"{directory} is not {name} below the site's root {cluster.root}; give --site with its"
            " own root"
        )
    study = load_study(directory)
    _report(study, directory, submit_study(study, cluster, again=True))


@app.command()
def doctor(
    site: Annotated[Path, typer.Option(help="TOML file that describes the cluster")],
    wait: Annotated[
        int,
        typer.Option(min=1, max=MOST_SECONDS, help="seconds until the job has to have ended"),
    ] = 1800,
    whole: All = False,
) -> None:
    """Check a cluster with one small job: ready, or its problems and exit code 2.

    Example: python -m slurm doctor --site my_cluster.toml
    """
    from slurm.doctor import Check, lines_of, visit
    from slurm.site import load_site

    cluster, checks = load_site(site), list[Check]()
    typer.echo(f"checking here, then by a job, which may take {wait} s to end", err=True)
    try:
        checks.extend(visit(cluster, wait))
    except UserError as error:
        checks.append(Check("a job on nodes", str(error)))
    typer.echo("\n".join(lines_of(checks, whole=whole)))
    if any(check.problem for check in checks):
        raise typer.Exit(2)


@app.command()
def unexclude(
    name: StudyName,
    nodes: Annotated[list[str], typer.Argument(help="nodes that are fit again")],
    root: Root = Path("runs"),
) -> None:
    """Let trainings go to nodes again that a health check found unfit.

    Example: python -m slurm unexclude tiny node7
    """
    from slurm.submission.record import submitting
    from slurm.submission.record import unexclude as include

    directory = directory_of(name, root)
    with submitting(directory):
        include(directory, nodes)


@app.command()
def run(
    name: StudyName,
    step: Annotated[str, typer.Argument(help="a step that is not complete, as status lists them")],
    root: Root = Path("runs"),
    interactive: Annotated[
        bool, typer.Option("--interactive", help="ask salloc for a node; else run in its shell")
    ] = False,
) -> None:
    """Run one step on one node interactively, to look for a fault.

    Example: python -m slurm run tiny train-lr3e-3 --interactive
    """
    from slurm.job.element import allocate, run_here

    directory = directory_of(name, root)
    (allocate if interactive else run_here)(directory, step)


@app.command(hidden=True)
def advance(
    study_dir: Path,
    ending: Annotated[str | None, typer.Option(help="the job that calls, as JOB_INDEX")] = None,
) -> None:
    """Submit what can start; jobs do so at their end.

    Example: python -m slurm advance /shared/studies/tiny
    """
    from slurm.job.supervision import advance_at_end

    follow_root(study_dir.parent)
    advance_at_end(study_dir, ending)


@app.command(hidden=True)
def job(
    study_dir: Path,
    array: str,
    index: int,
    stop_file: Annotated[Path, typer.Argument(help="asks the job to stop")],
) -> None:
    """Run one element; job scripts do so.

    Example: python -m slurm job /shared/studies/tiny train 0
    /shared/studies/tiny/slurm/stop/17_0.0
    """
    from slurm.job.element import run_element

    follow_root(study_dir.parent)
    run_element(study_dir, array, index, stop_file)


if __name__ == "__main__":
    run_command(app, "slurm", SYNONYMS)
