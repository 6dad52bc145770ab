"""The command that compares results: what it reads, prints and writes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from ckpt_tools.hf_directory import compared_results
from ckpt_tools.holm import Pairing, pairs_of
from quant_eval import comparison
from quant_eval.comparison import FIGURES, Comparison, Result
from quant_eval.statistics import UNITS
from train.command import UserError
from train.run_directory import write_json

PLAIN_WIDTH = 250  # columns where there is no terminal
SHOWN_PARTS = 3  # of a model's path: run, hf, checkpoint


def compare(
    results: Annotated[list[Path], typer.Argument(help="result.json files or their directories, two or more.")],
    figure: Annotated[str, typer.Option(help="Of the results, such as kl_divergence.")] = "relative_error",
    successive: Annotated[bool, typer.Option("--successive", help="Each with the one before it.")] = False,
    all_pairs: Annotated[bool, typer.Option("--all-pairs", help="Each with every other.")] = False,
    level: Annotated[float, typer.Option(help="Coverage of the intervals; 1 - level is that of the tests.")] = 0.95,
    samples: Annotated[int, typer.Option(min=1, help="Resamplings of the documents.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamplings.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file that takes the comparisons.")] = None,
) -> None:
    """Compare results on the same documents: differences, paired intervals, tests corrected for their number.

    By default each result stands against the first. A pair is told apart by its p-value after Holm's correction over
    all pairs of the call; the intervals are not corrected.

    Example: python -m quant_eval compare run/hf/step*/quant/gptq-b3-g128 --figure kl_divergence --successive
    """
    if successive and all_pairs:
        raise UserError("--successive and --all-pairs are two ways to form pairs; give one of them")
    if not 0 < level < 1:
        raise UserError(f"--level {level:g} is no coverage; give one between 0 and 1, such as 0.95")
    if figure not in FIGURES:
        raise UserError(f"no figure is called '{figure}'; take one of {', '.join(FIGURES)}")
    paths = compared_results(results)
    pairing: Pairing = "successive" if successive else "all" if all_pairs else "baseline"
    read = [read_result(path) for path in paths]
    comparisons = comparison.compare(
        read, pairs_of(len(read), pairing), figure, samples=samples, level=level, seed=seed
    )
    settings = {
        "figure": figure,
        "unit": UNITS[figure],
        "pairing": pairing,
        "level": level,
        "samples": samples,
        "seed": seed,
    }
    print_comparisons(read, comparisons, figure, level)
    if out:
        write_json(out, _as_json(read, paths, comparisons, settings))


def read_result(path: Path) -> Result:
    """A result.json; UserError where it is none."""
    try:
        return Result.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a result.json of 'python -m quant_eval run'") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{path} is not valid JSON; measure again with 'python -m quant_eval run'") from None
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(
            f"{path} is no result of this version ({key}: {problem['msg']}); measure again with "
            f"'python -m quant_eval run'"
        ) from None


def print_comparisons(results: list[Result], comparisons: list[Comparison], figure: str, level: float) -> None:
    """A table with a row per pair."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(box=box.SIMPLE_HEAD, title=f"{figure}, {UNITS[figure]}", title_justify="left")
    for heading in ("result", "spec", "compared with", "spec"):
        table.add_column(heading, overflow="fold")
    for heading in ("figure", "of the other", "difference", f"{level:.4g} interval", "p", "p (Holm)"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for one in comparisons:
        second, first, difference = results[one.second], results[one.first], one.difference
        table.add_row(
            *(tail(second), second.spec.name, tail(first), first.spec.name),
            *(f"{one.second_value:.5g}", f"{one.first_value:.5g}", f"{difference.value:+.3g}"),
            f"[{difference.low:+.3g}, {difference.high:+.3g}]",
            *(f"{difference.p_value:.2g}", f"{one.p_adjusted:.2g}", one.verdict),
        )
    console.print(table)
    sources = sorted({one.sources for one in comparisons})
    console.print(
        f"Intervals cover the draw of {' or of '.join(sources)}, and are not corrected for the number of pairs; "
        f"verdicts are, at {1 - level:.4g} (Holm).",
        soft_wrap=True,
    )


def tail(result: Result) -> str:
    """The end of a model's path that tells it from others of a study."""
    return "/".join(Path(result.model.path).parts[-SHOWN_PARTS:])


def _as_json(
    results: list[Result], paths: list[Path], comparisons: list[Comparison], settings: dict[str, Any]
) -> dict[str, Any]:
    named = [
        {"result": str(path), "model": result.model.path, "spec": result.spec.name}
        for path, result in zip(paths, results, strict=True)
    ]
    pairs = [
        one._asdict()
        | {"first": named[one.first], "second": named[one.second]}
        | {"difference": one.difference._asdict()}
        for one in comparisons
    ]
    return {"settings": settings | {"method": comparison.METHOD}, "pairs": pairs}
