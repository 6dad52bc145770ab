"""All claims with their verdicts, for the report and as text."""

import textwrap
from collections.abc import Sequence

import study.claims
from study.claims.verdict import ALPHA, MOST_LISTED, Claim, Evidence, Verdict
from study.definition import Study
from study.discovery import discovered
from study.measurements.kind import INTERVAL_LEVEL
from study.results.paired import Paired
from study.results.table import Row

OUTCOMES = ("supported", "contradicted", "not decided", "not tested")
NOTE = (
    "Each line is one quantity by itself. Its comparisons, of runs or of pairs of runs, are"
    f" significant where p < {ALPHA:.2g} after Holm's correction over them; claims, and the lines"
    " of a claim, are not corrected against each other. Supported: every comparison is significant"
    " the way of the claim. Contradicted: some are significant the other way and none its way; a"
    " slope represents its pairs, unless one of them is significant the other way. Not decided: the"
    f" data are there and show neither. Intervals are {INTERVAL_LEVEL:.0%} and not corrected;"
    " p-values are. Comparisons are paired over documents: they hold for other text of the same"
    " kind, not for other seeds. Only Kendall's tau, whose unit is the run, is about those. Of more"
    f" than {MOST_LISTED} comparisons the range is given. Relative errors are in per cent,"
    " divergences and losses in nats per token. The claims are in our words."
)
WIDTH = 110
Judgements = list[tuple[Claim, list[Verdict]]]


def judge_all(study_: Study, rows: Sequence[Row], paired: Paired) -> Judgements:
    """Return every claim with its verdicts; one without any is not tested."""
    evidence = Evidence(study_, rows, paired)
    judged = []
    for claim in discovered(study.claims, Claim):
        verdicts = claim.judge(evidence)
        if not verdicts:
            verdicts = [Verdict("not tested", "the study has no such data")]
        if {verdict.outcome for verdict in verdicts} == {"not tested"}:
            reasons = dict.fromkeys(verdict.statistic for verdict in verdicts)
            verdicts = [Verdict("not tested", f"{'; '.join(reasons)}. Needed: {claim.needs}")]
        judged.append((claim, verdicts))
    return judged


def tally(verdicts: list[Verdict]) -> str:
    """Return 'supported by 3 of 4, not decided by 1', 'supported by all 4' or 'not tested'."""
    counts = {one: sum(verdict.outcome == one for verdict in verdicts) for one in OUTCOMES}
    parts = [f"{outcome} by {count}" for outcome, count in counts.items() if count]
    if len(parts) == 1:
        return verdicts[0].outcome + (f" by all {len(verdicts)}" if len(verdicts) > 1 else "")
    return ", ".join([f"{parts[0]} of {len(verdicts)}", *parts[1:]])


def headline(verdicts: list[Verdict]) -> str:
    """Return the size of the effect by the first quantity that has one."""
    with_effect = (one for one in verdicts if one.effect)
    return next((f"{one.measure}: {one.effect}" for one in with_effect), "")


def claims_text(study_: Study, judged: Judgements) -> str:
    """Return the claims with their statistics as plain text."""
    lines = [f"Claims of arXiv 2510.06213, by the data of {study_.name}"]
    for claim, verdicts in judged:
        head = f"{claim.sentence} ({claim.source}) {tally(verdicts).capitalize()}."
        lines += ["", *textwrap.wrap(head, WIDTH)]
        for verdict in verdicts:
            measure = f"{verdict.measure}: " if verdict.measure else ""
            text = f"{verdict.outcome.upper()}  {measure}{verdict.statistic}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join([*lines, "", *textwrap.wrap(NOTE, WIDTH)])
