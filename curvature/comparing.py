"""`python -m curvature compare`: what it reads, prints and writes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ckpt_tools.hf_directory import compared_results
from ckpt_tools.holm import Pairing, pairs_of
from curvature import comparison
from curvature.comparison import Comparison
from train.command import UserError
from train.run_directory import write_json

LARGEST_LEVEL = 0.9999
PLAIN_WIDTH = 250  # columns where there is no terminal


def compare_command(
    results: Annotated[list[Path], typer.Argument(help="result.json files or their directories, two or more.")],
    figure: Annotated[str, typer.Option(help="trace, or that of a block: embedding, layer0, head.")] = "trace",
    successive: Annotated[bool, typer.Option("--successive", help="Each with the one before it.")] = False,
    all_pairs: Annotated[bool, typer.Option("--all-pairs", help="Each with every other.")] = False,
    level: Annotated[float, typer.Option(help="Coverage of the intervals; 1 - level is that of the tests.")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="JSON file that takes the comparisons.")] = None,
) -> None:
    """Compare traces measured on the same microbatches with the same probes: differences, paired intervals, tests.

    By default each result stands against the first. A pair is told apart by its p-value after Holm's correction over
    all pairs of the call; the intervals are not corrected.

    Example: python -m curvature compare run/hf/step*/curvature/hutchinson --successive
    """
    if successive and all_pairs:
        raise UserError("--successive and --all-pairs are two ways to form pairs; give one of them")
    if not 0 < level <= LARGEST_LEVEL:
        raise UserError(f"--level {level:g} is no coverage; give one between 0 and {LARGEST_LEVEL}, such as 0.95")
    paths = compared_results(results)

    pairing: Pairing = "successive" if successive else "all" if all_pairs else "baseline"
    read = [comparison.read_result(_content(path), str(path)) for path in paths]
    comparisons = comparison.compare(read, pairs_of(len(read), pairing), figure, level=level)
    labels = [result.label for result in read]
    _print(labels, comparisons, f"{figure}, {comparison.UNIT}", level)
    if out:
        settings = {"figure": figure, "unit": comparison.UNIT, "pairing": pairing, "level": level}
        named = [{"result": str(path), "model": one.model.path} for path, one in zip(paths, read, strict=True)]
        pairs = [
            one._asdict()
            | {"first": named[one.first], "second": named[one.second]}
            | {"difference": one.difference._asdict()}
            for one in comparisons
        ]
        write_json(out, {"settings": settings | {"method": comparison.METHOD}, "pairs": pairs})


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a result.json of 'python -m curvature run'") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{path} is not valid JSON; measure again with 'python -m curvature run'") from None


def _print(labels: list[str], comparisons: list[Comparison], title: str, level: float) -> None:
    """A table with a row per pair."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("result", "compared with"):
        table.add_column(heading, overflow="fold")
    for heading in ("figure", "of the other", "difference", "error", "unpaired", f"{level:.4g} interval"):
        table.add_column(heading, justify="right")
    for heading in ("p", "p (Holm)"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for one in comparisons:
        difference, unpaired = one.difference, one.unpaired_standard_error
        times = f" ({unpaired / difference.standard_error:.1f} x)" if difference.standard_error else ""
        table.add_row(
            *(labels[one.second], labels[one.first], f"{one.second_value:.5g}", f"{one.first_value:.5g}"),
            *(f"{difference.value:+.3g}", f"{difference.standard_error:.2g}", f"{unpaired:.2g}{times}"),
            f"[{difference.low:+.3g}, {difference.high:+.3g}]",
            *(f"{difference.p_value:.2g}", f"{one.p_adjusted:.2g}", one.verdict),
        )
    console.print(table)
    console.print(
        f"Errors cover the draw of microbatches and probes, the same for both; 'unpaired' would be that of draws of "
        f"their own. Intervals are not corrected for the number of pairs; verdicts are, at {1 - level:.4g} (Holm).",
        soft_wrap=True,
    )
