"""Rankings as plain text."""

from collections.abc import Iterator, Sequence

from base.statistics import INTERVAL_LEVEL
from dynamics.choices.learning_rate import QUANTIZED_LOSS, Answer, answers, sweeps
from dynamics.choices.ranking import Ranked
from dynamics.claims.verdict import Evidence, Measure

NOTE = (
    f"Intervals are {INTERVAL_LEVEL:.0%}, over {{sources}}; p is of no difference to the first,"
    " paired, with Holm's correction over all pairs of a list. At equal loss log error is linear in"
    " the loss between two checkpoints of a run, and the losses are taken as known. A run that"
    " passes the loss before its anneal is compared as it is there."
)


def headline(rankings: Sequence[Answer]) -> str:
    """Return the first ranking in a sentence; empty without any."""
    answer = next((each for each in rankings if each.ranking), None)
    if answer is None:
        return ""
    of, (best, second, *_) = answer.measure, answer.ranking
    return (
        f"{_titled(of)}, {answer.where}: the peak learning rate {best.label} has the lowest,"
        f" {_value(of, best.estimate.value)}; {second.label} has {_difference(of, second)}."
    )


def learning_rate_line(evidence: Evidence) -> str:
    """Return the first ranking of peak learning rates; empty for a study that sweeps none."""
    return headline(answers(evidence)) if sweeps(evidence.ends) else ""


def answers_text(rankings: Sequence[Answer]) -> str:
    """Return every ranking as lines, and a note on intervals and tests."""
    lines = [headline(rankings)]
    for answer in rankings:
        title = f"{_titled(answer.measure)}, {answer.where}: {answer.reason}".rstrip()
        lines += ["", title, *_ranking(answer.measure, answer.ranking)]
    sources = dict.fromkeys(
        name for answer in rankings for ranked in answer.ranking for name in ranked.estimate.sources
    )
    return "\n".join([*lines, "", NOTE.format(sources=" and ".join(sources) or "nothing")])


def _titled(of: Measure) -> str:
    """Return the name of a measure with the unit of the values below it."""
    return f"{of.title} in nats per token" if of.unit else of.title


def _ranking(of: Measure, ranking: Sequence[Ranked]) -> Iterator[str]:
    width = max((len(ranked.label) for ranked in ranking), default=0)
    for place, ranked in enumerate(ranking, 1):
        low, high = (_value(of, end) for end in ranked.estimate.interval(INTERVAL_LEVEL))
        own = f"{_value(of, ranked.estimate.value)} [{low}, {high}]"
        yield f"  {place}. {ranked.label:{width}}  {own}" + (
            f"  {_difference(of, ranked)}" if ranked.excess else ""
        )


def _value(of: Measure, value: float) -> str:
    if of.figure == QUANTIZED_LOSS:
        return f"{value:.4f}"
    return f"{100 * value:.3g}%" if of.figure == "relative_error" else f"{value:.3g}"


def _difference(of: Measure, ranked: Ranked) -> str:
    assert ranked.excess is not None
    low, high = (of.signed(end) for end in ranked.excess.interval(INTERVAL_LEVEL))
    return f"{of.signed(ranked.excess.value)} [{low}, {high}], Holm p {ranked.p_adjusted:.2g}"
