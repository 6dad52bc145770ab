"""The command by which table, report and MLflow follow a study at work."""

import os
from pathlib import Path

import typer

from study.choosing import Root, StudyName, existing

NICENESS = 10  # beside the steps: a core that one wants is that step's


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
    mirror(directory, study, tracking_uri(root), collected.settled)
    typer.echo(f"{directory}: {collected.num_found} of {collected.expected} results")
