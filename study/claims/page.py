"""All claims with their verdicts, as lines of a table."""

from collections.abc import Sequence
from typing import NamedTuple

from base.quantities import MILLINATS
from base.statistics import INTERVAL_LEVEL, holm
from study.claims.verdict import ALPHA, Claim, Evidence, Verdict, in_words
from study.content import loaded
from study.definition import Study
from study.experiments import Experiment
from study.results.paired import Paired
from study.results.table import Row

NOTE = (
    "Each claim is judged by one primary measure: KL divergence at the fewest bits where it is on"
    " the error, the loss increase where it is on training at changed weights. A claim is decided"
    f" where its effect, over all runs, has p < {ALPHA:.2g} after Holm's correction over the claims"
    " with a p-value, and no run is significantly the other way after Holm's correction over the"
    " runs."
    " Other measures are secondary, and their p-values uncorrected. Intervals are"
    f" {INTERVAL_LEVEL:.0%}, not corrected, and hold documents, calibration draws and seeds. Runs"
    " that differ in their seed alone count as one. * no seeds: of these trainings only, so a claim"
    " holds or fails in these runs, and is neither supported nor contradicted."
)
EFFECT = f"effect [{INTERVAL_LEVEL:.0%} interval], {MILLINATS}"
HEAD = ("claim", "verdict", EFFECT, "Holm p", "runs")
Judgements = list[tuple[Claim, list[Verdict]]]
CLOSE = 5  # times p is from ALPHA at most, either way, where a second study may decide otherwise


class Line(NamedTuple):
    """A claim in the table.

    Attributes:
        p_adjusted: by Holm's correction over the claims; None where nothing is tested.
        runs: how many go the way of the effect, in words.
        against: the strongest observation the other way, in words; empty where there is none.
        details: the verdict by every measure, the primary one first.
    """

    claim: Claim
    outcome: str
    effect: str
    p_adjusted: float | None
    runs: str
    against: str
    details: list[Verdict]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells below `HEAD`."""
        return self.claim.sentence, self.words, self.effect, self.p, self.runs

    @property
    def p(self) -> str:
        """Holm's p in words, with a mark where it is of single trainings; '' without a test."""
        if self.p_adjusted is None:
            return ""
        return f"{self.p_adjusted:.2g}{'' if self.details[0].holds_seeds else '*'}"

    @property
    def is_close(self) -> bool:
        """Holm's p is near the threshold: other seeds may well decide otherwise."""
        p = self.p_adjusted
        return p is not None and ALPHA / CLOSE <= p <= ALPHA * CLOSE

    @property
    def words(self) -> str:
        """The verdict as it is shown."""
        return in_words(self.outcome, holds_seeds=self.details[0].holds_seeds)

    @property
    def why(self) -> str:
        """A sentence where some runs show nothing alone and the verdict is by all; '' elsewhere."""
        primary = self.details[0]
        # Holm's correction over the claims may leave open what the claim alone decides.
        return primary.why if self.outcome == primary.outcome else ""


def judge_all(
    study_: Study, rows: Sequence[Row], paired: Paired, experiment: Experiment | None = None
) -> Judgements:
    """Return every claim that the study is about with its verdicts; of an experiment its own.

    Each verdict is by its own p-value.
    """
    evidence = Evidence(study_, rows, paired)
    judged = []
    claims: list[Claim] = loaded("claims")
    for claim in claims:
        is_asked = experiment is None or experiment.judges(claim.name)
        if not (is_asked and claim.concerns(study_)):
            continue
        verdicts = claim.judge(evidence)
        if not verdicts:
            verdicts = [Verdict("not tested", "the study has no such data")]
        # No measure could be tested: one line with all reasons, and with what would help.
        if {verdict.outcome for verdict in verdicts} == {"not tested"}:
            reasons = dict.fromkeys(verdict.statistic for verdict in verdicts)
            verdicts = [Verdict("not tested", f"{'; '.join(reasons)}. Needed: {claim.needs}")]
        judged.append((claim, verdicts))
    return judged


def claims_table(judged: Judgements) -> list[Line]:
    """Return a line for every claim, by its primary measure and with Holm's correction over them.

    The family are all claims with a p-value: those that it leaves undecided, too.
    """
    primary = {claim.name: verdicts[0] for claim, verdicts in judged}
    # One p-value for each claim, by its primary measure: secondary ones are not in the family.
    p_values = {name: verdict.p for name, verdict in primary.items() if verdict.p is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [_line(claim, verdicts, adjusted.get(claim.name)) for claim, verdicts in judged]


def _line(claim: Claim, verdicts: list[Verdict], p_adjusted: float | None) -> Line:
    primary = verdicts[0]
    # What is significant alone may not be among so many claims.
    is_left_open = p_adjusted is not None and p_adjusted > ALPHA
    outcome = "not decided" if is_left_open else primary.outcome
    against = _against(verdicts)
    return Line(claim, outcome, primary.effect, p_adjusted, primary.runs, against, verdicts)


def close_in_words(lines: Sequence[Line]) -> str:
    """Return which verdicts a second study of the same size may not repeat; '' without any."""
    names = [line.claim.name for line in lines if line.is_close]
    if not names:
        return ""
    return (
        f"Close to the threshold (Holm p {ALPHA / CLOSE:g} to {ALPHA * CLOSE:g}), so that other"
        f" seeds, or another kind of CPU, may decide otherwise: {', '.join(names)}."
    )


def _against(verdicts: list[Verdict]) -> str:
    """Return a run the other way than the primary effect, or else a measure."""
    primary, *others = verdicts
    if primary.against or primary.p is None:
        return primary.against
    # An undecided effect has no opposite.
    reverse = {"supported": "contradicted", "contradicted": "supported"}.get(primary.outcome)
    opposed = [verdict for verdict in others if verdict.outcome == reverse]
    return f"{opposed[0].measure}: {opposed[0].effect}" if opposed else ""
