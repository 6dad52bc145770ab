"""Options, table and JSON that the compare commands of quant_eval and curvature share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from base.aligned import aligned
from base.files import write_json
from base.statistics import INTERVAL_LEVEL, Pairing
from ckpt_tools.hf.results import Result, labels

Results = Annotated[
    list[Path], typer.Argument(metavar="RESULT", help="result.json or its directory, two or more.")
]
Pairs = Annotated[
    Pairing,
    typer.Option(help="Each with the first (baseline), the one before (successive) or all."),
]
Out = Annotated[Path | None, typer.Option(help="JSON file that takes the comparisons.")]


def report(
    results: Sequence[Result[Any]],
    comparisons: Sequence[Any],
    settings: Mapping[str, Any],
    note: str,
    out: Path | None,
    **errors: Sequence[float],
) -> None:
    """Print a row per pair, and write settings and pairs as JSON to `out`.

    Args:
        results: those that were compared.
        comparisons: named tuples with the places of both results, their values, the difference,
            the adjusted p-value and the verdict.
        settings: figure and unit of the values, and how they were compared.
        note: what the errors cover.
        out: the JSON file; None: print only.
        errors: further columns, a value for each pair.
    """
    names = [
        f"{label} {result.spec.name}"
        for label, result in zip(labels(results), results, strict=True)
    ]
    columns = ("result", "compared with", "figure", "of the other", "difference", *errors)
    rows = [(*columns, f"{INTERVAL_LEVEL:.0%} interval", "p", "p (Holm)", "verdict")]
    for comparison, *pair_errors in zip(comparisons, *errors.values(), strict=True):
        rows.append(_row(comparison, names, pair_errors))

    typer.echo(f"{settings['figure']}, {settings['unit']}")
    typer.echo("\n".join(aligned(rows)))
    typer.echo(
        f"{note} Intervals are not corrected for the number of pairs; verdicts are, at"
        f" {1 - INTERVAL_LEVEL:.2g} (Holm)."
    )
    if out:
        write_json(out, {"settings": settings, "pairs": _pairs(results, comparisons)})


def _row(comparison: Any, names: list[str], errors: Sequence[float]) -> tuple[str, ...]:
    """Return the cells of a pair of results."""
    difference = comparison.difference
    return (
        *(names[comparison.second], names[comparison.first]),
        *(f"{comparison.second_value:.5g}", f"{comparison.first_value:.5g}"),
        *(f"{difference.value:+.3g}", *(f"{error:.2g}" for error in errors)),
        f"[{difference.low:+.3g}, {difference.high:+.3g}]",
        *(f"{difference.p_value:.2g}", f"{comparison.p_adjusted:.2g}", comparison.verdict),
    )


def _pairs(results: Sequence[Result[Any]], comparisons: Sequence[Any]) -> list[dict[str, Any]]:
    names = [
        {"result": str(result.path), "model": result.model.path, "spec": result.spec.name}
        for result in results
    ]
    return [
        comparison._asdict()
        | {"first": names[comparison.first], "second": names[comparison.second]}
        | {"difference": comparison.difference._asdict()}
        for comparison in comparisons
    ]
