"""Claims on curvature: flatter minima quantize better."""

from study.claims.permutation import kendall
from study.claims.verdict import (
    ALPHA,
    SIGNIFICANT,
    Evidence,
    Measure,
    NotTested,
    Verdict,
    by_measure,
    claim,
    decided,
    judged,
    measures,
)
from study.results.paired import TRACE, every_pair
from study.results.summary import RunSummary
from study.results.table import Row
from train.run.config import RunConfig

TOP = "curvature/lambda_max"
NOT_MEASURED = "the study measures no curvature"


@claim(
    90,
    "sharpness",
    "Flatter minima quantize better: over the runs error and curvature rise together.",
    source="section 6.2, appendix G",
    needs="curvature at the end of three runs or more",
)
def across_runs(evidence: Evidence) -> list[Verdict]:
    """Correlate over the ends of training the ranks of error and of each measure of curvature."""
    verdicts = []
    for spec in evidence.study.quantization.specs:
        quantities = {"trace": TRACE, "largest eigenvalue": TOP}
        if spec in evidence.study.quantization.by_block:
            quantities["delta'H delta / 2 of its own step"] = f"curvature/step-{spec}/second_order"
        for name, quantity in quantities.items():
            for of in measures(evidence, [spec]):
                verdicts.append(judged(f"{name} and {of.title}", _correlated, of, quantity))
    return verdicts


def _correlated(of: Measure, quantity: str) -> Verdict:
    settings = of.evidence.study.curvature
    if settings is None:
        raise NotTested(NOT_MEASURED)
    if quantity == TOP and not settings.lambda_max:
        raise NotTested("the study measures no largest eigenvalue")
    ends = {end.label: of.end(end, quantity) for end in _independent(of.evidence)}
    if len(ends) < 3:
        raise NotTested(f"{len(ends)} independent runs have no rank correlation to speak of")
    if quantity == TOP and not all(row[f"{TOP}_converged"] for row in ends.values()):
        raise NotTested("the largest eigenvalue of a last checkpoint did not converge")
    tau, p = kendall(
        [row[quantity] for row in ends.values()], [row[of.column] for row in ends.values()]
    )
    _, least = kendall(range(len(ends)), range(len(ends)))
    words = (
        f"Kendall's tau {tau:+.2f} over {len(ends)} independent runs, exact two-sided p {p:.2g} (by"
        " permutation)"
    )
    effect = f"Kendall's tau {tau:+.2f} over {len(ends)} runs, p {p:.2g}"
    if least > ALPHA:
        words += f"; so few runs cannot decide, their best p is {least:.2g}"
    if quantity == TRACE:
        words += f"; {_agreeing(of, ends)}"
    is_significant = p <= ALPHA
    return Verdict(decided(is_significant and tau > 0, is_significant, 1), words, effect)


def _independent(evidence: Evidence) -> list[RunSummary]:
    """The first of the runs that branch from one run, and all others.

    Branches share most of their training; permuted runs would not.
    """
    kept: dict[str, RunSummary] = {}
    for end in evidence.ends:
        name = end.run.name
        if isinstance(end.run, RunConfig) and end.run.branch_from:
            name = evidence.study.parent_of(end.run).name
        kept.setdefault(name, end)
    return list(kept.values())


def _agreeing(of: Measure, ends: dict[str, Row]) -> str:
    """The pairs of these runs that differ significantly by both quantities, and the same way."""
    pairs = every_pair(ends)
    traces, errors = of.evidence.paired.compared_traces(pairs), of.compared(pairs)
    ways = [(traces[pair].verdict, errors[pair].verdict) for pair in pairs]
    both = [way for way in ways if set(way) <= set(SIGNIFICANT)]
    same = sum(trace == error for trace, error in both)
    return (
        f"of the {len(ways)} pairs of these very runs {len(both)} differ significantly by both,"
        f" {same} of them the same way (paired over microbatches and over documents, Holm)"
    )


@claim(
    100,
    "sharpening",
    "In the decay curvature and error rise together.",
    source="section 6.2, appendix G",
    needs="curvature before and after the decay",
)
@by_measure
def along_the_anneal(of: Measure) -> Verdict:
    """Compare run by run the ways of trace and error in the decay."""
    if of.evidence.study.curvature is None:
        raise NotTested(NOT_MEASURED)
    pairs = of.both_ends(TRACE)
    traces, errors = of.evidence.paired.compared_traces(pairs), of.compared(pairs)
    ways = [(traces[label].verdict, errors[label].verdict) for label in pairs]
    both = [way for way in ways if set(way) <= set(SIGNIFICANT)]
    same = sum(trace == error for trace, error in both)
    factors = {label: one.second_value / one.first_value for label, one in traces.items()}
    parts = [
        f"{label}: trace x {factors[label]:.3g} (p {traces[label].p_adjusted:.2g}),"
        f" error {of.signed(error.difference.value)} (p {error.p_adjusted:.2g})"
        for label, error in errors.items()
    ]
    words = (
        f"significantly the same way in {same} of {len(ways)} runs, the other way in"
        f" {len(both) - same} (trace paired over microbatches, error over documents, Holm):"
        f" {'; '.join(parts)}"
    )
    moved = of.spread([error.difference.value for error in errors.values()])
    grown = f"trace x {min(factors.values()):.3g} to x {max(factors.values()):.3g}"
    verdict = decided(same, len(both) - same, len(ways))
    return Verdict(verdict, words, f"{grown}, error {moved}")
