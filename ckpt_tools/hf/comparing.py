"""Options, verdict, table and JSON that the compare commands of quant_eval and curvature share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from base.aligned import aligned, wrapped
from base.files import write_json
from base.quantities import significant, with_interval
from base.statistics import INTERVAL_LEVEL, Pairing
from ckpt_tools.hf.results import Result, labels

LEAST_P = 0.001  # shown
SHOWN_PAIRS = 16  # a screen with what stands above and below them

Results = Annotated[
    list[Path], typer.Argument(metavar="RESULT", help="result.json or its directory, two or more.")
]
Pairs = Annotated[
    Pairing,
    typer.Option(help="Each with the first (baseline), the one before (successive) or all."),
]
Out = Annotated[Path | None, typer.Option(help="JSON file that takes the comparisons.")]
All = Annotated[bool, typer.Option("--all", help="Print all, however long.")]


class ShownFigure(NamedTuple):
    """A figure as it is shown: its title, and scale and unit of its differences.

    Values are scaled alike unless `decimals` says how many digits they have in nats/token.
    """

    title: str
    unit: str
    scale: float = 1.0
    decimals: int | None = None

    def value(self, number: float) -> str:
        """Return the value of a result."""
        if self.decimals is not None:
            return f"{number:.{self.decimals}f}"
        return significant(self.scale * number)


def report(
    results: Sequence[Result[Any]],
    comparisons: Sequence[Any],
    figure: ShownFigure,
    settings: Mapping[str, Any],
    note: str,
    *,
    out: Path | None,
    whole: bool,
) -> None:
    """Print the verdict and a row per pair, and write settings and pairs as JSON to `out`.

    Args:
        results: those that were compared.
        comparisons: named tuples with the places of both results, their values, the difference,
            the adjusted p-value and the verdict.
        figure: what is shown of them.
        settings: figure and unit of the values, and how they were compared.
        note: what the errors cover.
        out: the JSON file; None: print only.
        whole: whether all pairs are printed, however many.
    """
    names = _names(results)
    typer.echo("\n".join(wrapped(_verdict(comparisons, names, figure))))
    shown = comparisons if whole else comparisons[:SHOWN_PAIRS]
    typer.echo()
    typer.echo("\n".join(_table(shown, names, figure)))
    if more := len(comparisons) - len(shown):
        typer.echo(f"and {more} more pairs; --all prints them, --out FILE writes them")
    typer.echo()
    typer.echo("\n".join(wrapped(note)))
    if out:
        write_json(out, {"settings": settings, "pairs": _pairs(results, comparisons)})


def _names(results: Sequence[Result[Any]]) -> list[str]:
    """Return a name per result: the model, and the spec where they differ in it."""
    models, specs = labels(results), [result.spec.name for result in results]
    if len(set(specs)) == 1:
        return models
    if len(set(models)) == 1:
        return specs
    return [" ".join(each) for each in zip(models, specs, strict=True)]


def _verdict(comparisons: Sequence[Any], names: Sequence[str], figure: ShownFigure) -> str:
    """Return the outcome in a sentence."""
    different = sum(pair.verdict != "not significant" for pair in comparisons)
    if len(comparisons) > 1:
        return (
            f"{different or 'none'} of {len(comparisons)} pairs differ{'s' * (different < 2)}"
            f" significantly in {figure.title} (p below {1 - INTERVAL_LEVEL:.2g} after Holm's"
            " correction)"
        )
    (pair,) = comparisons
    first, second, p = names[pair.first], names[pair.second], _p_value(pair.p_adjusted)
    difference = pair.difference
    value, low, high = difference.value, difference.low, difference.high
    if not different:
        between = with_interval(value, low, high, figure.scale)
        return (
            f"no significant difference in {figure.title} between {second} and {first}:"
            f" {between} {figure.unit}, {p}"
        )
    # A word says the direction, so the number has no sign.
    if value < 0:
        value, low, high = -value, -high, -low
    size = f"{with_interval(value, low, high, figure.scale)} {figure.unit}"
    return f"{second} has a {pair.verdict} {figure.title} than {first}, by {size} ({p})"


def _p_value(value: float) -> str:
    """Return a p-value in words."""
    return f"p {value:.2g}" if value >= LEAST_P else f"p < {LEAST_P:g}"


def _table(pairs: Sequence[Any], names: Sequence[str], figure: ShownFigure) -> list[str]:
    """Return a row per pair, headed by the units."""
    own = ", nats/token; difference" if figure.decimals is not None else " and its difference"
    first, *others = {names[pair.first] for pair in pairs}
    lines = [f"{figure.title}{own}, {figure.unit}, with {INTERVAL_LEVEL:.0%} interval"]
    if not others:
        lines.append(f"compared with {first}: {figure.value(pairs[0].first_value)}")
    heads = ["result", "value"] + ["compared with", "its value"] * bool(others)
    rows = [(*heads, "difference", "p (Holm)", "verdict")]
    for pair in pairs:
        cells = [names[pair.second], figure.value(pair.second_value)]
        if others:
            cells += [names[pair.first], figure.value(pair.first_value)]
        ends = pair.difference.value, pair.difference.low, pair.difference.high
        difference = with_interval(*ends, figure.scale)
        p_value = _p_value(pair.p_adjusted).removeprefix("p ")
        rows.append((*cells, difference, p_value, pair.verdict))
    return lines + aligned(rows)


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
