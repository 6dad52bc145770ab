"""python -m slurm: a study on a cluster, from its submission to its last element."""

import time
from pathlib import Path
from typing import Annotated

import typer

from study.choosing import (
    Every,
    Family,
    Name,
    Profile,
    Settings,
    Source,
    Stage,
    StudyName,
    Text,
    TextCommand,
    TokenizerDirectory,
    asked_of,
    directory_of,
    released_of,
    wanted,
)
from study.settings import Study, load_study
from train.command import UserError, run_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

INTERRUPTED = 130  # as a shell says it
FOLLOW_SECONDS = 0.5

Root = Annotated[Path | None, typer.Option(help="directory of all studies; default: the site's, or runs")]
SiteFile = Annotated[Path | None, typer.Option("--site", help="the site file, whose root is taken")]


def _directory(name: str, root: Path | None, site: Path | None) -> Path:
    """The directory of a study, below the root or the site's."""
    if root and site:
        raise UserError("--root and --site both say where studies lie; give one of them")
    if site:
        from slurm.site import load_site

        root = Path(load_site(site).root)
    return directory_of(name, root or Path("runs"))


@app.command(cls=TextCommand)
def submit(
    name: Name,
    site: Annotated[Path, typer.Option(help="TOML file that describes the cluster, see slurm/sites/example.toml")],
    profile: Profile = "full",
    settings: Settings = None,
    source: Source = None,
    every: Every = None,
    stage: Stage = None,
    family: Family = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every script, ask SLURM nothing")] = False,
) -> None:
    """Submit a study, or what is missing of it: all jobs at once, each waiting for what it needs.

    Example: python -m slurm submit olmo2-7b-lr --site my_cluster.toml --dry-run

    Example: python -m slurm submit tiny --site my_cluster.toml --profile smoke --set engine=deepspeed
    """
    from slurm import submit as submission
    from slurm.site import load_site

    cluster = load_site(site)
    study = wanted(
        name,
        Path(cluster.root),
        profile,
        settings,
        released_of(source, every, stage, family),
        asked_of(text, tokenizer),
    )
    if dry_run:
        for script in submission.dry_run(study, cluster):
            typer.echo(script)
        return
    _tell(study, Path(cluster.root) / study.name, submission.submit(study, cluster))


def _tell(study: Study, study_dir: Path, submitted: dict[str, int]) -> None:
    """A line per array that was submitted, and the totals."""
    from slurm.submission import existing_submission

    watch = f"python -m slurm status {study.name} --root {study_dir.parent}"
    if not submitted:
        typer.echo(f"nothing to submit: every element is complete or was submitted before; see '{watch}'")
        return
    submission = existing_submission(study_dir)
    width = max(map(len, submitted))
    for name, count in submitted.items():
        array = submission.job_arrays[name]
        jobs = [job for job in submission.jobs if job.array == name]
        while sum(len(job.indices) for job in jobs[1:]) >= count:  # those behind are of this submission
            del jobs[0]
        kinds = dict.fromkeys(f"{one.kind} of {one.array}" for one in array.after)
        waits = [next(iter(kinds))] if kinds else []
        waits += [f"{len(kinds) - 1} more"] if len(kinds) > 1 else []
        waits += [f"held for {', '.join(array.held_for)}"] if array.held_for else []
        after = f", {' and '.join(waits)}" if waits else ""
        numbers = ", ".join(str(job.id) for job in jobs)
        typer.echo(f"{name:{width}}  {count:,} elements, job {numbers}{after}")
    typer.echo(f"{len(submitted):,} arrays, {sum(submitted.values()):,} elements; watch with '{watch}'")


@app.command()
def status(
    name: StudyName,
    root: Root = None,
    site: SiteFile = None,
    watch: Annotated[float | None, typer.Option(min=5, help="show it again every so many seconds, until all ends")] = (
        None
    ),
) -> None:
    """Show how far a study is: trainings, checkpoints and measurements, what failed and where its log is.

    Example: python -m slurm status tiny --site my_cluster.toml --watch 60
    """
    from rich.console import Console

    from slurm.status import plain, print_shown, shown
    from slurm.watching import look

    directory, console = _directory(name, root, site), Console()
    try:
        while True:
            overview = look(directory)
            if console.is_terminal:
                if watch:
                    console.clear()
                print_shown(shown(overview), console)
            else:
                print(plain(shown(overview)), end="", flush=True)
            if not watch or overview.is_over:
                return
            time.sleep(watch)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def logs(
    name: StudyName,
    which: Annotated[str | None, typer.Argument(help="a step, an array or ARRAY/INDEX; default: list logs")] = None,
    root: Root = None,
    site: SiteFile = None,
    follow: Annotated[bool, typer.Option("--follow", help="go on with what is added, until interrupted")] = False,
    lines: Annotated[int, typer.Option(min=1, help="printed of the end")] = 200,
) -> None:
    """List the logs of what failed and what runs, or print one.

    Example: python -m slurm logs tiny

    Example: python -m slurm logs tiny quantize-1/3 --follow
    """
    from slurm.logs import chosen_log, follow_log, listed, tail_lines

    directory = _directory(name, root, site)
    if which is None:
        if follow:
            raise UserError(f"--follow needs a log; 'python -m slurm logs {name}' lists them")
        for line in listed(directory):
            typer.echo(line)
        return
    log = chosen_log(directory, which)
    if isinstance(log, list):
        for line in log:
            typer.echo(line)
        return
    typer.echo(f"==> {log} <==", err=True)
    try:
        text, place = tail_lines(log, lines)
        typer.echo(text, nl=False)
        if follow:
            for part in follow_log(log, place, FOLLOW_SECONDS):
                typer.echo(part, nl=False)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def cancel(
    name: StudyName,
    root: Root = None,
    site: SiteFile = None,
    run: Annotated[str | None, typer.Option(help="only what belongs to this run")] = None,
    array: Annotated[str | None, typer.Option(help="only this array")] = None,
    after_checkpoint: Annotated[
        bool, typer.Option("--after-checkpoint", help="trainings that run save a checkpoint first; the rest is at once")
    ] = False,
) -> None:
    """Cancel what is queued or runs; files stay as they are, and `retry` goes on from them.

    Example: python -m slurm cancel tiny --run lr3e-3 --after-checkpoint
    """
    from slurm.cancel import cancel as cancel_elements

    directory = _directory(name, root, site)
    cancelled, stopping = cancel_elements(directory, run=run, array=array, after_checkpoint=after_checkpoint)
    typer.echo(f"{len(cancelled):,} elements cancelled")
    for stopped in stopping:
        typer.echo(f"{stopped} stops after its next step, with a checkpoint")


@app.command()
def retry(name: StudyName, root: Root = None, site: SiteFile = None) -> None:
    """Submit again what failed, was cancelled or never started; with --site as that file says now.

    Example: python -m slurm retry tiny --site my_cluster.toml
    """
    from slurm.site import load_site
    from slurm.submission import existing_submission
    from slurm.submit import submit as submit_study

    directory = _directory(name, root, site)
    cluster = load_site(site) if site else existing_submission(directory).site
    if directory.resolve() != (Path(cluster.root) / name).resolve():
        raise UserError(
            f"{directory} is not {name} below the site's root {cluster.root}; give --site with its own root"
        )
    existing_submission(directory)
    study = load_study(directory)
    _tell(study, directory, submit_study(study, cluster, again=True))


@app.command(hidden=True)
def job(
    study_dir: Path, array: str, index: int, stop_file: Annotated[Path, typer.Option(help="asks the job to stop")]
) -> None:
    """Run one element; job scripts do so.

    Example: python -m slurm job /shared/studies/tiny train 0 --stop-file /shared/studies/tiny/slurm/stop/17_0.0
    """
    from slurm.job import run_element

    run_element(study_dir, array, index, stop_file)


if __name__ == "__main__":
    run_command(app, "slurm")
