"""Claims on curvature: flatter minima quantize better."""

from itertools import combinations

from study.claims.permutation import kendall
from study.claims.schedule import both_ends
from study.claims.verdict import (
    ALPHA,
    FIGURES,
    SIGNIFICANT,
    Evidence,
    NotTested,
    Verdict,
    by_measure,
    claim,
    decided,
    end_of,
    judged,
    measure_of,
    signed,
    spread,
)
from study.results.paired import TRACE
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
            for figure in FIGURES:
                measure = f"{name} and {measure_of(spec, figure)}"
                verdicts.append(judged(measure, _correlated, evidence, quantity, spec, figure))
    return verdicts


def _correlated(evidence: Evidence, quantity: str, spec: str, figure: str) -> Verdict:
    if evidence.study.curvature is None:
        raise NotTested(NOT_MEASURED)
    if quantity == TOP and not evidence.study.curvature.lambda_max:
        raise NotTested("the study measures no largest eigenvalue")
    column = f"quant/{spec}/{figure}"
    ends = {end.label: end_of(end, quantity, column) for end in _independent(evidence)}
    if len(ends) < 3:
        raise NotTested(f"{len(ends)} independent runs have no rank correlation to speak of")
    if quantity == TOP and not all(row[f"{TOP}_converged"] for row in ends.values()):
        raise NotTested("the largest eigenvalue of a last checkpoint did not converge")
    tau, p = kendall(
        [row[quantity] for row in ends.values()], [row[column] for row in ends.values()]
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
        words += f"; {_agreeing(evidence, ends, spec, figure)}"
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


def _agreeing(evidence: Evidence, ends: dict[str, Row], spec: str, figure: str) -> str:
    """The pairs of these runs that differ significantly by both quantities, and the same way."""
    traces = evidence.paired.order_of_traces(ends)
    errors = evidence.paired.order(ends, spec, figure)
    both = [
        pair
        for pair in combinations(ends, 2)
        if traces[pair] in SIGNIFICANT and errors[pair] in SIGNIFICANT
    ]
    same = sum(traces[pair] == errors[pair] for pair in both)
    return (
        f"of the {len(traces)} pairs of these very runs {len(both)} differ significantly by both,"
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
def along_the_anneal(evidence: Evidence, spec: str, figure: str) -> Verdict:
    """Compare run by run the ways of trace and error in the decay."""
    if evidence.study.curvature is None:
        raise NotTested(NOT_MEASURED)
    pairs = both_ends(evidence, f"quant/{spec}/{figure}", TRACE)
    traces = evidence.paired.compared_traces(list(pairs.values()))
    errors = evidence.compared(pairs, figure, spec).values()
    ways = [(trace.verdict, error.verdict) for trace, error in zip(traces, errors, strict=True)]
    both = [way for way in ways if set(way) <= set(SIGNIFICANT)]
    same = sum(trace == error for trace, error in both)
    parts = [
        f"{label}: trace x {trace.second_value / trace.first_value:.3g} (p {trace.p_adjusted:.2g}),"
        f" error {signed(error.difference.value, figure)} (p {error.p_adjusted:.2g})"
        for label, trace, error in zip(pairs, traces, errors, strict=True)
    ]
    words = (
        f"significantly the same way in {same} of {len(ways)} runs, the other way in"
        f" {len(both) - same} (trace paired over microbatches, error over documents, Holm):"
        f" {'; '.join(parts)}"
    )
    factors = sorted(trace.second_value / trace.first_value for trace in traces)
    moved = spread([error.difference.value for error in errors], figure)
    effect = f"trace x {factors[0]:.3g} to x {factors[-1]:.3g}, error {moved}"
    return Verdict(decided(same, len(both) - same, len(ways)), words, effect)
