"""Verdicts on claims and effects of factors as text for a terminal, the answer first."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from base.aligned import WIDTH, aligned, wrapped
from base.quantities import MILLINATS
from base.statistics import INTERVAL_LEVEL
from study.claims.page import HEAD, NOTE, Line, claims_table, close_in_words, judge_all
from study.content import contents
from study.definition import Study
from study.report.cells import Cell, Table
from study.report.parts import parts_of
from study.report.tables import effect_tables
from study.results.collect import left_out_lines
from study.results.effects import effects_of
from study.results.kinds import kinds_of_study, mixed_in_words
from study.results.paired import Paired
from study.results.summary import enumeration
from study.results.table import read_table

UNIT = f"Effects [{INTERVAL_LEVEL:.0%} interval] in {MILLINATS}; p corrected for the claims (Holm)."
SINGLE = "* of single trainings: other seeds may say otherwise."
# Verdicts in the order of a summary, as verbs where they are sentences.
COUNTED = {
    "contradicted": "contradicted",
    "holds in these runs": "true of these runs alone",
    "fails in these runs": "false of these runs alone",
    "not decided": "not decided",
}
COMPARED = 4  # values of a factor on the first screen


def report_lines(directory: Path, study: Study, *, whole: bool = False) -> Iterator[str]:
    """Yield the verdicts on all claims and the effects of all factors; `whole` with every test."""
    paired, kinds = Paired(directory), kinds_of_study(directory, study)
    sections, every = [], list[Line]()
    for experiment, part, rows in parts_of(study, read_table(directory, study)):
        lines = claims_table(judge_all(part, rows, paired, experiment))
        mixed = mixed_in_words(kinds, [run.name for run in part.runs])
        title = experiment.title if experiment else ""
        effects = effect_tables(part, effects_of(part, rows, paired))
        sections.append((title, lines, " ".join(mixed), effects))
        every += lines

    yield from wrapped(f"{study.name}: {summary_of(every)}")
    for title, lines, against_all, effects in sections:
        yield ""
        if title:
            yield from wrapped(f"== {title}: {summary_of(lines)}")
        yield from claims_lines(lines, against_all, whole=whole)
        # Of many experiments the effects are as many screens.
        if whole or not title:
            yield from effects_lines(effects, whole=whole)
    yield ""
    yield from left_out_lines(directory, study)
    yield from (
        wrapped(NOTE)
        if whole
        else ["--all adds every measure, run and test, and effects by all of them"]
    )


def summary_of(lines: Sequence[Line]) -> str:
    """Return '3 of 6 claims supported, 1 contradicted, 2 not decided; 9 not tested'."""
    counts = Counter(line.words for line in lines)
    tested = len(lines) - counts["not tested"]
    if not tested:
        return f"none of {len(lines)} claims tested, for lack of data"
    words = [f"{counts['supported']} of {tested} claims supported"]
    words += [f"{counts[verdict]} {said}" for verdict, said in COUNTED.items() if counts[verdict]]
    untested = f"; {counts['not tested']} not tested" if counts["not tested"] else ""
    return f"{', '.join(words)}{untested}"


# Above what single runs show.
ALONE = "No objection, since the verdict is on the mean over all, with more data than one alone:"


def claims_lines(
    lines: Sequence[Line], against_all: str = "", *, whole: bool = False
) -> Iterator[str]:
    """Yield a table of the tested claims, and what speaks against them or why it does not.

    `against_all` speaks against every one.
    """
    tested = [line for line in lines if line.outcome != "not tested"]
    columns = slice(None) if whole else slice(4)
    if tested:
        papers = enumeration([each.paper for each in contents()])
        head = (f"claim of {papers}", "verdict", "effect", *HEAD[3:])
        yield from aligned([head[columns], *(line.cells[columns] for line in tested)])
        yield from wrapped(f"{UNIT} {SINGLE if any('*' in line.p for line in tested) else ''}")
    if close := close_in_words(tested):
        yield from wrapped(close)
    untested = [line.claim.name for line in lines if line.outcome == "not tested"]
    if untested:
        yield from wrapped(f"not tested, for lack of data: {', '.join(untested)}")

    objections = [*_objections(tested, whole)]
    if against_all:
        objections += _within(f"all: {against_all}", whole)
    yield from ["", "What speaks against:", *objections] if objections else []
    reasons = [text for line in tested if line.why for text in _reason(line, whole)]
    yield from ["", ALONE, *reasons] if reasons else []
    if whole:
        yield from _details(lines)


def _objections(tested: Sequence[Line], whole: bool) -> Iterator[str]:
    for line in tested:
        if line.against:
            yield from _within(f"{line.claim.name}: {line.against}", whole)


def _reason(line: Line, whole: bool) -> list[str]:
    """Return why a run that shows nothing alone is no objection; its first sentence, or all."""
    words = line.why if whole else line.why.partition(". ")[0]
    return _within(f"{line.claim.name}: {words}", whole)


def _within(words: str, whole: bool) -> list[str]:
    """Return an indented paragraph, or what of it fits into one line."""
    if whole:
        return wrapped(f"  {words}")
    return [f"  {textwrap.shorten(words, WIDTH - 2, placeholder=' ...')}"]


def _details(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        yield from ["", *wrapped(f"{line.claim.sentence} ({line.claim.source}): {line.words}")]
        for detail in line.details:
            head = f"{detail.measure}, {detail.words}: " if detail.measure else ""
            yield from wrapped(f"  {head}{detail.statistic}")


def effects_lines(tables: Sequence[Table], *, whole: bool = False) -> Iterator[str]:
    """Yield a line per comparison, by loss and first error; `whole` a line per measure."""
    for table in tables:
        yield ""
        yield table.title if whole or not table.body else f"{table.title}, as above, p uncorrected"
        if whole or not table.body:
            yield from _every_measure(table)
            continue
        head = [_without_unit(name) for name in ("", *table.columns[1:3])]
        shown = table.body[:COMPARED]
        yield from aligned([head, *([_text(cell) for cell in row[:3]] for row in shown)])
        if len(shown) < len(table.body):
            yield f"and {len(table.body) - len(shown)} more"


def _without_unit(name: str) -> str:
    return name.removesuffix(f", {MILLINATS}")


def _text(cell: Cell) -> str:
    return f"{cell.text} {cell.interval}".strip()


def _every_measure(table: Table) -> Iterator[str]:
    names = table.columns[1:-1]
    width = max(map(len, names))
    for row in table.body:
        yield f"{row[0].text}:"
        for name, shown in zip(names, row[1:-1], strict=True):
            yield f"  {name:{width}}  {_text(shown)}".rstrip()
    yield from wrapped(table.note)
