"""Two studies side by side: what was set otherwise, which runs match, and how far their figures lie apart.

Runs match by name, else by label; checkpoints by their tokens, or by their steps where tokens are unknown. Where both
studies measured on the same documents, differences are paired over them; else the interval is that of two independent
estimates, d -/+ sqrt(sum of squared half widths) (MOVER: Zou and Donner 2008, "Construction of confidence intervals
about effect measures"), and no verdict is given.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any, NamedTuple

from study.claims.page import judge_all
from study.claims.verdict import signed
from study.collect import read_table, trained
from study.paired import Measured, Paired, Row, other_text
from study.settings import Study, load_study, spec_title
from study.summary import AnyRun, Rows, ends_of_training, estimate, in_order
from train.command import UserError

COMPARED = {
    "cross_entropy": "loss",
    "cross_entropy_quantized": "quantized loss",
    "relative_error": "relative error",
    "kl_divergence": "KL divergence",
}
MOST_SHOWN = 90  # characters of a setting
ABSENT = "not there"


class Table(NamedTuple):
    """A part of the comparison, for the page and for the terminal."""

    title: str
    note: str
    head: tuple[str, ...]
    body: list[tuple[str, ...]]


@dataclass(frozen=True)
class Side:
    """One of the two studies."""

    name: str
    study: Study
    rows: Rows
    paired: Paired

    def weights(self, run: AnyRun) -> Rows:
        """The rows of a run's weights."""
        return [row for row in trained(self.rows) if row["run"] == run.name]


class Match(NamedTuple):
    """A run of the first study and the one of the second that it stands beside."""

    label: str
    first: AnyRun
    second: AnyRun


def open_sides(first: Path, second: Path) -> tuple[Side, Side]:
    """Two study directories with their tables; told apart by their names, or by their paths if those agree."""
    if first.resolve() == second.resolve():
        raise UserError(f"{first} and {second} are one directory; give those of two studies")
    studies = [load_study(directory) for directory in (first, second)]
    same = studies[0].name == studies[1].name
    left, right = (
        Side(str(directory) if same else study.name, study, read_table(directory, study), Paired(directory))
        for directory, study in zip((first, second), studies, strict=True)
    )
    return left, right


def match_runs(first: Study, second: Study) -> list[Match]:
    """Every run of `first` that has its counterpart in `second`, each used once, in order."""
    others = {run.name: run for run in second.runs}
    found = {run.name: others.pop(run.name) for run in first.runs if run.name in others}
    by_label = {second.label_of(run): run for run in others.values()}
    for run in first.runs:
        if run.name not in found and first.label_of(run) in by_label:
            found[run.name] = by_label.pop(first.label_of(run))
    return [Match(first.label_of(run), run, found[run.name]) for run in in_order(first) if run.name in found]


def match_rows(first: Rows, second: Rows) -> list[tuple[Row, Row]]:
    """Checkpoints of two runs with the same tokens, or the same step where tokens are unknown."""

    def agree(one: Row, other: Row) -> bool:
        if one["tokens"] is None or other["tokens"] is None:
            return bool(one["step"] == other["step"])
        return bool(one["tokens"] == other["tokens"])

    return [(one, other) for one in first for other in second if agree(one, other)]


def compare(first: Side, second: Side) -> list[Table]:
    """Everything there is to say of two studies."""
    matches = match_runs(first.study, second.study)
    return [
        _settings(first, second, matches),
        _unmatched(first, second, matches),
        *_final(first, second, matches),
        _along(first, second, matches),
        _claims(first, second),
    ]


def _flat(content: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON."""
    if isinstance(content, dict) and content:
        parts = (_flat(value, f"{prefix}{key}.") for key, value in content.items())
        return {key: value for part in parts for key, value in part.items()}
    return {prefix.removesuffix("."): json.dumps(content)}


def _differences(first: dict[str, str], second: dict[str, str]) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys([*first, *second])
    values = ((key, first.get(key, ABSENT), second.get(key, ABSENT)) for key in keys)
    return [(key, _short(one), _short(other)) for key, one, other in values if one != other]


def _short(value: str) -> str:
    return value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}... ({len(value)} characters)"


def _settings(first: Side, second: Side, matches: list[Match]) -> Table:
    """Settings that differ; what differs alike in all matched runs is told once."""
    studies = [_flat(side.study.model_dump(mode="json", exclude={"runs"})) for side in (first, second)]
    body: list[tuple[str, ...]] = [("study", *one) for one in _differences(studies[0], studies[1])]
    of_run = {}
    for match in matches:
        contents = [_flat(run.model_dump(mode="json")) for run in (match.first, match.second)]
        for content in contents:
            content.pop("branch_from.fingerprint", None)  # another one wherever the parent differs
        of_run[match.label] = _differences(contents[0], contents[1])
    shared = [one for one in next(iter(of_run.values()), []) if all(one in found for found in of_run.values())]
    body += [("every matched run", *one) for one in shared]
    body += [(f"run {label}", *one) for label, found in of_run.items() for one in found if one not in shared]
    note = "" if body else "The two studies have the same settings."
    return Table("Settings that differ", note, ("of", "setting", first.name, second.name), body)


def _unmatched(first: Side, second: Side, matches: list[Match]) -> Table:
    body: list[tuple[str, ...]] = []
    taken = ({match.first.name for match in matches}, {match.second.name for match in matches})
    for side, names in zip((first, second), taken, strict=True):
        body += [(side.name, "run", side.study.label_of(run)) for run in in_order(side.study) if run.name not in names]
    specs = [side.study.quantization.at_the_end for side in (first, second)]
    for side, own, others in ((first, specs[0], specs[1]), (second, specs[1], specs[0])):
        body += [(side.name, "quantization", spec_title(spec)) for spec in own if spec not in others]
    note = "" if body else "Every run and every quantization of either study has its counterpart."
    return Table("Without a counterpart", note, ("study", "what", "which"), body)


def _common(first: Side, second: Side) -> list[str]:
    others = second.study.quantization.at_the_end
    return [spec for spec in first.study.quantization.at_the_end if spec in others]


def _final(first: Side, second: Side, matches: list[Match]) -> list[Table]:
    """A table per quantization that both have: the last weights of the matched runs that are ends of training."""
    ends = [{run.name for run in ends_of_training(side.study)} for side in (first, second)]
    chosen = [match for match in matches if match.first.name in ends[0] and match.second.name in ends[1]]
    tables: list[Table] = []
    for spec in _common(first, second):
        body, reasons = [], []
        for figure, name in COMPARED.items():
            if figure == "cross_entropy" and tables:
                continue  # the same at every quantization
            lines, unpaired = _final_lines(first, second, chosen, spec, figure)
            body += [(name, *line) for line in lines]
            reasons += unpaired
        note = (
            "Second minus first. Paired over documents where p is given: bootstrap-t, Holm's correction over the runs "
            "of a figure, 95% intervals not corrected. Relative errors in per cent, the rest in nats per token."
        )
        if reasons:
            note += f" Not paired, two independent intervals: {'; '.join(dict.fromkeys(reasons))}."
        head = ("figure", first.study.heading, first.name, second.name, "difference", "interval", "p", "verdict")
        tables.append(Table(f"End of training: {spec_title(spec)}", note, head, body))
    return tables


def _final_lines(
    first: Side, second: Side, matches: list[Match], spec: str, figure: str
) -> tuple[list[tuple[str, ...]], list[str]]:
    """A line per matched run, and why some are not paired."""
    column, lines, reasons = f"quant/{spec}/{figure}", {}, []
    pairs: dict[str, tuple[Measured, Measured]] = {}
    for match in matches:
        rows = [_last(side, run) for side, run in ((first, match.first), (second, match.second))]
        one, other = (estimate(row, column) for row in rows)
        if rows[0] is None or rows[1] is None or one is None or other is None:
            lines[match.label] = (
                match.label,
                *("not measured" if found is None else "measured" for found in (one, other)),
            )
            continue
        values = (match.label, _number(one.value, figure), _number(other.value, figure))
        reason = other_text(first.paired.result(rows[0], spec), second.paired.result(rows[1], spec))
        if reason is None:
            pairs[match.label] = ((rows[0], spec), (rows[1], spec))
            lines[match.label] = values
            continue
        reasons.append(f"the studies differ in {reason}")
        value = other.value - one.value
        low = value - hypot(other.value - other.low, one.high - one.value)
        high = value + hypot(other.high - other.value, one.value - one.low)
        interval = f"[{signed(low, figure)}, {signed(high, figure)}]"
        lines[match.label] = (*values, signed(value, figure), interval, "", "not paired")
    for label, found in zip(pairs, first.paired.compared(list(pairs.values()), figure, second.paired), strict=True):
        difference = found.difference
        interval = f"[{signed(difference.low, figure)}, {signed(difference.high, figure)}]"
        told = (signed(difference.value, figure), interval, f"{found.p_adjusted:.2g}", found.verdict)
        lines[label] = (*lines[label], *told)
    return [(*line, *[""] * (7 - len(line))) for line in lines.values()], reasons


def _last(side: Side, run: AnyRun) -> Row | None:
    return next((row for row in side.weights(run) if row["step"] == run.total_steps), None)


def _number(value: float, figure: str) -> str:
    return f"{100 * value:.4g}%" if figure == "relative_error" else f"{value:.5g}"


def _along(first: Side, second: Side, matches: list[Match]) -> Table:
    """How many checkpoints of matched runs match, and where the second study's divergence is told apart."""
    specs = [spec for spec in first.study.quantization.specs if spec in second.study.quantization.specs]
    body = []
    for match in matches:
        rows = (first.weights(match.first), second.weights(match.second))
        pairs = match_rows(*rows)
        counts = (str(len(pairs)), *(str(len(own) - len(pairs)) for own in rows))
        body.append((match.label, *counts, *(_told_along(first, second, pairs, spec) for spec in specs)))
    head = (first.study.heading, "matched", f"only {first.name}", f"only {second.name}", *map(spec_title, specs))
    note = (
        "Checkpoints with the same tokens (or step, where tokens are unknown), and at how many of them the KL "
        "divergence of the second study is told higher or lower: paired over documents, Holm's correction over the "
        "checkpoints of a run."
    )
    return Table("Along training", note, head, body)


def _told_along(first: Side, second: Side, rows: Iterable[tuple[Row, Row]], spec: str) -> str:
    column = f"quant/{spec}/kl_divergence"
    measured = [pair for pair in rows if None not in (pair[0][column], pair[1][column])]
    pairs = [
        ((one, spec), (other, spec))
        for one, other in measured
        if other_text(first.paired.result(one, spec), second.paired.result(other, spec)) is None
    ]
    if not pairs:
        return "none measured on the same documents"
    verdicts = [found.verdict for found in first.paired.compared(pairs, "kl_divergence", second.paired)]
    return f"higher {verdicts.count('higher')}, lower {verdicts.count('lower')} of {len(verdicts)}"


def _claims(first: Side, second: Side) -> Table:
    """The verdicts of both studies on the paper's claims."""
    sides = [
        {(claim.sentence, verdict.measure): verdict.outcome for claim, verdicts in judged for verdict in verdicts}
        for judged in (judge_all(side.study, side.rows, side.paired) for side in (first, second))
    ]
    body, told = [], ""
    for sentence, measure in dict.fromkeys([*sides[0], *sides[1]]):
        outcomes = (side.get((sentence, measure), "not tested") for side in sides)
        body.append((sentence if sentence != told else "", measure, *outcomes))
        told = sentence
    note = "Each study by its own data, which its report gives; a claim is of no other value because two studies agree."
    return Table("Claims of the paper", note, ("claim", "measured by", first.name, second.name), body)
