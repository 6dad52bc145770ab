"""`python -m curvature compare`."""

from typing import Annotated

import typer

from base.statistics import pairs_of
from ckpt_tools.hf.comparing import LEVEL, Out, Pairs, Results, report
from ckpt_tools.hf.directory import compared_results
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import read_result

NOTE = (
    "Errors cover the draw of microbatches and probes, the same for both; 'unpaired' would be that"
    " of draws of their own."
)


def compare(
    results: Results,
    figure: Annotated[
        str, typer.Option(help="trace, or that of a block: embedding, layer0, head.")
    ] = "trace",
    pairs: Pairs = "baseline",
    out: Out = None,
) -> None:
    """Compare traces of the same microbatches and probes: differences, paired intervals, tests.

    The verdict on a pair is by its p-value after Holm's correction over all pairs of the call; the
    95% intervals are not corrected.

    Example: python -m curvature compare run/hf/step*/curvature/hutchinson --pairs successive
    """
    paths = compared_results(results)
    from curvature import paired_traces

    read = [read_result(path, Curvature) for path in paths]
    comparisons = paired_traces.compare(read, pairs_of(len(read), pairs), figure, level=LEVEL)
    settings = {
        "figure": figure,
        "unit": paired_traces.UNIT,
        "pairing": pairs,
        "level": LEVEL,
        "method": paired_traces.METHOD,
    }
    report(
        read,
        comparisons,
        settings,
        NOTE,
        out,
        error=[each.difference.standard_error for each in comparisons],
        unpaired=[each.unpaired_standard_error for each in comparisons],
    )
