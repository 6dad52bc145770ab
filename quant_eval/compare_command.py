"""`python -m quant_eval compare`."""

from typing import Annotated, Any

import typer

from base.errors import UserError
from base.statistics import pairs_of
from ckpt_tools.hf.comparing import LEVEL, Out, Pairs, Results, report
from ckpt_tools.hf.directory import compared_results
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from quant_eval.compare import FIGURES, METHOD, compare
from quant_eval.measuring.statistics import UNITS

BOOTSTRAP: Any = {"samples": 10_000, "level": LEVEL, "seed": 0}  # over documents


def compare_command(
    results: Results,
    figure: Annotated[
        str, typer.Option(help="Of the results, such as kl_divergence.")
    ] = "relative_error",
    pairs: Pairs = "baseline",
    out: Out = None,
) -> None:
    """Compare results on the same documents: differences, paired intervals, corrected tests.

    The verdict on a pair is by its p-value after Holm's correction over all pairs of the call; the
    95% intervals are not corrected.

    Example: python -m quant_eval compare run/hf/step*/quant/gptq-b3-g128 --figure kl_divergence
    """
    if figure not in FIGURES:
        raise UserError(f"no figure is called '{figure}'; take one of {', '.join(FIGURES)}")
    read = [read_result(path, Quantization) for path in compared_results(results)]
    comparisons = compare(read, pairs_of(len(read), pairs), figure, **BOOTSTRAP)
    settings = {"figure": figure, "unit": UNITS[figure], "pairing": pairs, "method": METHOD}
    sources = " or of ".join(sorted({each.sources for each in comparisons}))
    note = f"Intervals cover the draw of {sources}."
    report(read, comparisons, settings | BOOTSTRAP, note, out)
