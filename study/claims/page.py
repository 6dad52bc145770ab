"""The claims as a section of the report, and as text."""

import textwrap
from html import escape

from study.claims.catalogue import CLAIMS
from study.claims.verdict import ALPHA, MOST_LISTED, Claim, Evidence, Verdict
from study.paired import Paired
from study.settings import Study
from study.steps import INTERVAL_LEVEL
from study.summary import Rows

CLASSES = {
    "supported": "supported",
    "contradicted": "contradicted",
    "not decided": "undecided",
    "not tested": "untested",
}
NOTE = (
    f"Each line is one quantity by itself. Its comparisons - of runs, or of pairs of runs - are told apart at "
    f"{ALPHA:.0%} after Holm's correction; the claims, and the lines of a claim, are not corrected against each other. "
    f"Supported: every comparison is told to lie as the claim says. Contradicted: some are told to lie the other way "
    f"and none as it says; a slope stands for its pairs, unless one of them is told to lie the other way. Not decided: "
    f"the data are there and tell neither. Intervals are {INTERVAL_LEVEL:.0%} and not corrected; p-values are. "
    f"Comparisons hold for other text of the same kind, not for other seeds: only Kendall's tau, whose unit is the "
    f"run, speaks of those. Of more than {MOST_LISTED} comparisons the range is given. Relative errors are in per "
    f"cent, divergences and losses in nats per token. The claims are in our words."
)
WIDTH = 110


def judge_all(study: Study, rows: Rows, paired: Paired) -> list[tuple[Claim, list[Verdict]]]:
    """Every claim with its verdicts; one that has none to give is not tested."""
    evidence = Evidence(study, rows, paired)
    judged = []
    for claim in CLAIMS:
        verdicts = claim.judge(evidence)
        if not verdicts:
            verdicts = [Verdict("", "not tested", "the study has no such data")]
        if {verdict.outcome for verdict in verdicts} == {"not tested"}:
            reasons = dict.fromkeys(verdict.statistic for verdict in verdicts)
            verdicts = [Verdict("", "not tested", f"{'; '.join(reasons)}. Needed: {claim.needs}")]
        judged.append((claim, verdicts))
    return judged


def tally(verdicts: list[Verdict]) -> str:
    """'Supported by 3 of 4, not decided by 1.', 'Supported by all 4.' or 'Not tested.'."""
    counts = {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in CLASSES}
    parts = [f"{outcome} by {count}" for outcome, count in counts.items() if count]
    if len(parts) == 1:
        return f"{verdicts[0].outcome.capitalize()}{f' by all {len(verdicts)}' if len(verdicts) > 1 else ''}."
    parts[0] += f" of {len(verdicts)}"
    return f"{', '.join(parts).capitalize()}."


def claims_section(study: Study, rows: Rows, paired: Paired) -> str:
    """A line per claim that opens to its statistics, as HTML."""
    titles = "".join(f'<td class="text"><b>{title}</b></td>' for title in ("measured by", "verdict", "statistic"))
    parts = []
    for claim, verdicts in judge_all(study, rows, paired):
        body = "".join(
            f'<tr><td class="text">{escape(verdict.measure)}</td>'
            f'<td class="text"><span class="{CLASSES[verdict.outcome]}">{verdict.outcome}</span></td>'
            f'<td class="text">{escape(verdict.statistic)}</td></tr>'
            for verdict in verdicts
        )
        head = f"{escape(claim.sentence)} <b>{escape(tally(verdicts))}</b> ({escape(claim.source)})"
        table = f'<table class="wide"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
        parts.append(f'<details class="claim"><summary>{head}</summary>{table}</details>')
    return f'<h2>Claims of the paper</h2>{"".join(parts)}<p class="note">{escape(NOTE)}</p>'


def claims_text(study: Study, rows: Rows, paired: Paired) -> str:
    """The same as plain text."""
    lines = [f"Claims of arXiv 2510.06213, by the data of {study.name}"]
    for claim, verdicts in judge_all(study, rows, paired):
        lines += ["", *textwrap.wrap(f"{claim.sentence} ({claim.source}) {tally(verdicts)}", WIDTH)]
        for verdict in verdicts:
            measure = f"{verdict.measure}: " if verdict.measure else ""
            text = f"{verdict.outcome.upper()}  {measure}{verdict.statistic}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join([*lines, "", *textwrap.wrap(NOTE, WIDTH)])
