"""report.html: claims with effect sizes, figures, tables, settings and commands, in one file."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from base.errors import UserError
from base.statistics import INTERVAL_LEVEL
from quant_eval.measuring.statistics import METHOD
from study.claims.page import HEAD, NOTE, claims_table, judge_all
from study.claims.verdict import Evidence
from study.content import loaded
from study.definition import Study
from study.figures.canvas import Canvas
from study.figures.figure import draw_all, draw_one, figures_of
from study.measurements.quantization import DOCUMENTS, is_calibrated
from study.measurements.titles import shortened
from study.paths import REPORT
from study.report.answer import answer
from study.report.cells import Table, write_tables
from study.report.page import Section, write_page
from study.report.parts import ShownPart, parts_of
from study.report.provenance import commands, settings_of
from study.report.tables import (
    average_table,
    effect_tables,
    end_table,
    heat_tables,
    method_table,
    step_table,
)
from study.results.collect import diverged_runs
from study.results.effects import effects_of
from study.results.kinds import AGAINST, StudyKinds, kinds_of_study, mixed_in_words
from study.results.paired import Paired
from study.results.summary import enumeration, summarize
from study.results.table import Row, read_table
from study.tracking.store import server_command

ONE_DRAW = (
    " Every model is calibrated on one draw of the text: no interval or p-value here holds the"
    " differences between draws."
)


def write_report(directory: Path, study: Study) -> Path:
    """Draw the figures and write report.html, with a section for each experiment of the study."""
    rows, paired = read_table(directory, study), Paired(directory)
    kinds = kinds_of_study(directory, study)
    mixed = mixed_in_words(kinds, [run.name for run in study.runs])
    write_page(
        directory / REPORT,
        [_section(part, paired, kinds) for part in parts_of(study, rows)],
        study=study,
        newest=_newest(directory),
        facts=" ".join([_facts(study, rows), *_diverged(directory, study), *mixed]),
        claims_head=HEAD,
        note=NOTE,
        settings=settings_of(directory, study),
        commands=commands(directory, study),
        server=server_command(directory.parent),
        draw=_draw_command(directory, study),
    )
    return directory / REPORT


def _draw_command(directory: Path, study: Study) -> str:
    """Return the command that draws a figure alone, but for its name."""
    root = directory.parent
    at = "" if root == Path("runs") else f" --root {shlex.quote(str(root))}"
    return f"python -m study report {study.name}{at} --figure"


def draw_alone(directory: Path, study: Study, name: str) -> list[str]:
    """Draw one figure, in every experiment that shows it; return the paths of the PDFs.

    Raises:
        UserError: the study has no such figure, or nothing of it is measured yet.
    """
    shown = [
        (part, [figure.name for figure in figures_of(part.study, part.experiment)])
        for part in parts_of(study, read_table(directory, study))
    ]
    known = dict.fromkeys(each for _, names in shown for each in names)
    if name not in known:
        raise UserError(f"{study.name} has no figure {name}; take one of: {', '.join(known)}")
    paths = [
        draw_one(Canvas(part.study, part.rows, directory), name, part.experiment)
        for part, names in shown
        if name in names
    ]
    drawn = [str(path) for path in paths if path]
    if not drawn:
        raise UserError(f"{directory} holds nothing of {name} yet; see 'python -m study status'")
    return drawn


def _section(part: ShownPart, paired: Paired, kinds: StudyKinds) -> Section:
    """Return what is shown of a part of a study; write its figures and tables."""
    experiment, study, rows = part
    directory, name = paired.directory, experiment.name if experiment else ""
    canvas, evidence = Canvas(study, rows, directory), Evidence(study, rows, paired, experiment)
    figures, empty = draw_all(canvas, experiment)
    measured = effects_of(study, rows, paired)
    effects = effect_tables(study, measured)
    claims = claims_table(judge_all(study, rows, paired, experiment))
    tables = _tables(study, rows, paired)
    tables += [table for make in loaded("tables") for table in make(evidence)]
    write_tables(directory, [*effects, *tables], name)
    mixed = mixed_in_words(kinds, [run.name for run in study.runs])
    return Section(
        name,
        experiment.title if experiment else "",
        answer(study, measured, claims),
        " ".join([_facts(study, rows), *mixed]),
        *shortened(study.quantization.specs),
        canvas.runs,
        figures,
        empty,
        claims,
        AGAINST if mixed else "",
        " ".join(filter(None, (make(evidence) for make in loaded("sentences")))),
        effects,
        tables,
        intervals_note(study, rows),
    )


def _tables(study: Study, rows: Sequence[Row], paired: Paired) -> list[Table]:
    summaries = summarize(study, rows)
    tables = (
        end_table(study, summaries, paired),
        *heat_tables(study, summaries, paired),
        method_table(study, summaries),
        average_table(study, rows),
        step_table(study, summaries),
    )
    return [table for table in tables if table]


def _newest(directory: Path) -> str:
    """Return the day of the newest result, '23 November 2026' (UTC); empty without any."""
    times = [path.stat().st_mtime for path in directory.glob("*/hf/**/result.json")]
    newest = datetime.fromtimestamp(max(times), UTC) if times else None
    return f"{newest.day} {newest:%B %Y}" if newest else ""


def _facts(study: Study, rows: Sequence[Row]) -> str:
    """Return the size of the study in a sentence, and what its intervals leave out."""
    seeds = sorted({run.seed for run in study.trained})
    facts = f"{len(study.runs)} runs, {len(study.controls)} of them controls without an anneal"
    facts += f"; {len(rows)} measured models."
    if len(seeds) > 1:
        facts += f" Seeds {enumeration([str(seed) for seed in seeds])}."
    elif seeds:
        facts += (
            f" Every run is one training from seed {seeds[0]}: no interval or p-value here holds"
            " the differences between trainings."
        )
    return facts


def _diverged(directory: Path, study: Study) -> list[str]:
    """Return a sentence for every run that diverged."""
    return [f"{words}." for words in diverged_runs(directory, study).values()]


def intervals_note(study: Study, rows: Sequence[Row]) -> str:
    """Return what the intervals of a report are over, and what they leave out."""
    settings = study.quantization
    column = DOCUMENTS.of(settings.specs[0])
    counts = sorted({row[column] for row in rows} - {None})
    units = "blocks" if settings.documents == "concatenated" else "documents"
    evaluated = f"{' or '.join(map(str, counts)) or '0'} {units}"
    one_draw = settings.calibration_seeds == 1 and is_calibrated(settings.everywhere)
    return (
        f"Intervals of losses, errors and divergences: {INTERVAL_LEVEL:.0%}, each model for itself"
        f" ({METHOD}; the evaluation text has {evaluated}).{ONE_DRAW if one_draw else ''}"
        " The verdicts estimate"
        " differences over the same documents, calibration draws and seeds, with the variance of"
        " each source (Student's t with Satterthwaite's degrees of freedom), so a difference can be"
        " significant although the intervals overlap."
    )
