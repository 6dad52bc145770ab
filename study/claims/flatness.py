"""Claims on curvature: flatter minima quantize better."""

from itertools import combinations

from study.claims.permutation import kendall
from study.claims.schedule import both_ends
from study.claims.verdict import ALPHA, FIGURES, Evidence, Judged, Verdict, measure_of, missing, not_tested
from study.paired import TRACE, Row
from study.summary import RunSummary
from train.config import RunConfig

TOP = "curvature/lambda_max"
NOT_MEASURED = "the study measures no curvature"


def across_runs(evidence: Evidence) -> list[Verdict]:
    """Rank correlation, over the ends of training, of the error with trace, top eigenvalue and step curvature."""
    study = evidence.study
    verdicts = []
    for spec in study.quantization.specs:
        quantities = {"trace": TRACE, "largest eigenvalue": TOP}
        if spec in study.quantization.by_block:
            quantities["delta'H delta / 2 of its own step"] = f"curvature/step-{spec}/second_order"
        for name, quantity in quantities.items():
            for figure in FIGURES:
                judged = _correlated(evidence, quantity, spec, figure)
                verdicts.append(Verdict(f"{name} and {measure_of(spec, figure)}", *judged))
    return verdicts


def _correlated(evidence: Evidence, quantity: str, spec: str, figure: str) -> Judged:
    if evidence.study.curvature is None:
        return not_tested(NOT_MEASURED)
    if quantity == TOP and not evidence.study.curvature.lambda_max:
        return not_tested("the study measures no largest eigenvalue")
    column = f"quant/{spec}/{figure}"
    chosen = _independent(evidence)
    gap = missing((f"the end of {end.label}", end.last, one) for end in chosen for one in (quantity, column))
    if gap:
        return not_tested(gap)
    ends = {end.label: end.last for end in chosen if end.last}
    if len(ends) < 3:
        return not_tested(f"{len(ends)} independent runs have no rank correlation to speak of")
    if quantity == TOP and not all(row[f"{TOP}_converged"] for row in ends.values()):
        return not_tested("the largest eigenvalue of a last checkpoint did not converge")
    tau, p = kendall([row[quantity] for row in ends.values()], [row[column] for row in ends.values()])
    _, least = kendall(range(len(ends)), range(len(ends)))
    words = f"Kendall's tau {tau:+.2f} over {len(ends)} independent runs, exact two-sided p {p:.2g} (by permutation)"
    if least > ALPHA:
        words += f"; so few runs cannot decide, their best p is {least:.2g}"
    if quantity == TRACE:
        words += f"; {_agreeing(evidence, ends, spec, figure)}"
    if p > ALPHA:
        return Judged("not decided", words)
    return Judged("supported" if tau > 0 else "contradicted", words)


def _independent(evidence: Evidence) -> list[RunSummary]:
    """Of the runs that branch from one run the first: they share most of their training, a permutation would not."""
    kept: dict[str, RunSummary] = {}
    for end in evidence.ends:
        name = end.run.name
        if isinstance(end.run, RunConfig) and end.run.branch_from:
            name = evidence.study.parent_of(end.run).name
        kept.setdefault(name, end)
    return list(kept.values())


def _agreeing(evidence: Evidence, ends: dict[str, Row], spec: str, figure: str) -> str:
    """Of the pairs of these very runs that both quantities tell apart, how many lie the same way."""
    traces, errors = evidence.paired.order_of_traces(ends), evidence.paired.order(ends, spec, figure)
    both = [pair for pair in combinations(ends, 2) if "not told apart" not in (traces[pair], errors[pair])]
    same = sum(traces[pair] == errors[pair] for pair in both)
    return (
        f"of the {len(traces)} pairs of these very runs both tell {len(both)} apart, {same} of them the same way "
        f"(paired over microbatches and over documents, Holm)"
    )


def along_the_anneal(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Run by run whether trace and error move the same way in the decay."""
    if evidence.study.curvature is None:
        return not_tested(NOT_MEASURED)
    pairs, gap = both_ends(evidence, [f"quant/{spec}/{figure}", TRACE])
    if gap:
        return not_tested(gap)
    traces = evidence.paired.compared_traces(list(pairs.values()))
    errors = evidence.paired.compared([((first, spec), (last, spec)) for first, last in pairs.values()], figure)
    told = [(trace.verdict, error.verdict) for trace, error in zip(traces, errors, strict=True)]
    same = sum(trace == error != "not told apart" for trace, error in told)
    apart = sum("not told apart" not in one for one in told)
    parts = [
        f"{label}: trace x {trace.second_value / trace.first_value:.3g} (p {trace.p_adjusted:.2g}), error "
        f"{error.verdict} (p {error.p_adjusted:.2g})"
        for label, trace, error in zip(pairs, traces, errors, strict=True)
    ]
    words = (
        f"told to move the same way in {same} of {len(told)} runs, the other way in {apart - same} (trace paired over "
        f"microbatches, error over documents, Holm): {'; '.join(parts)}"
    )
    if same == len(told):
        return Judged("supported", words)
    return Judged("contradicted" if apart and not same else "not decided", words)
