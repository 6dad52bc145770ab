"""Averages of models made from files: soups, weighted and exponential means, LAWA windows; made again bit for bit."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ckpt_tools.averaging.ingredients import Ingredient, check_agreement, open_ingredient
from ckpt_tools.averaging.writer import Average, Recorded, make
from ckpt_tools.formats.parallel import default_processes
from ckpt_tools.hf_directory import LINEAGE_JSON, read_lineage
from train.command import Progress, UserError, explain_validation

CANCELLED = 1e-6  # a sum of factors this small beside their magnitudes is the rounding of 0


def average_models(
    out: Path,
    inputs: list[Path],
    *,
    weights: str | None = None,
    decay: float | None = None,
    window: int | None = None,
    accumulate: Literal["fp32", "fp64"] = "fp32",
    dtype: str | None = None,
    processes: int | None = None,
) -> None:
    """Writes the average of models as an HF directory: weights, configuration, tokenizer, lineage.json last.

    The mean is that of `AveragedWeights`; its bytes do not depend on the number of processes. Configuration and
    tokenizer are the last input's. With `window` = N, it is one average for every input but the first N - 1: the
    uniform mean of it and the N - 1 before it, at OUT/lawaN-<its name>. Those that are there already are kept.

    Args:
        out: the directory to write, whole or not at all; if it already is this average, nothing is done.
        inputs: HF directories and checkpoints (RUN/checkpoints/NAME of either engine, as trained), oldest first, of
            one architecture and tokenizer, of one run or several.
        weights: comma-separated factors. A negative one extrapolates away from its input; the sum must be positive.
        decay: 0 < decay < 1: the newest input has factor 1, each other one `decay` times its successor's.
        window: number of inputs in a LAWA window.
        accumulate: type of the sums.
        dtype: type to write, of `DTYPES`; None: that of the inputs.
        processes: at once; None: one per core.

    Raises:
        UserError: an input is damaged, has other weights than the others, or holds none in safetensors; an option is
            impossible; the average is not finite; or `out` is something else.
    """
    processes = processes or default_processes()
    method, factors = _factors(len(inputs), weights, decay, window)
    targets = [out / f"lawa{window}-{path.resolve().name}" for path in inputs[window - 1 :]] if window else [out]
    if len(set(targets)) != len(targets):
        raise UserError("two inputs have the same name, and so would their windows; average them from a directory each")
    with _opened(inputs, targets, processes) as ingredients:
        written = dtype or _common_dtype(ingredients)
        with Progress("average", total=len(targets)) if window else nullcontext() as bar:
            for first, target in enumerate(targets):
                members = ingredients[first : first + len(factors)]
                average = Average(target, method, factors, members, accumulate, written)
                make(average, processes, label=None if bar else "average")
                if bar:
                    bar.advance()


def rebuild(lineage: Path, out: Path, *, processes: int | None = None) -> None:
    """Makes an average again from its lineage, bit for bit.

    Args:
        lineage: lineage.json of an average, or its HF directory; ingredients are looked for from there.
        out: the directory to write, as for `average_models`.
        processes: at once; None: one per core.

    Raises:
        UserError: an ingredient is gone or is not what the average was made from, or other weights come out than then.
    """
    processes = processes or default_processes()
    directory = lineage.parent if lineage.name == LINEAGE_JSON else lineage
    found = read_lineage(directory)
    if found is None:
        raise UserError(f"{lineage} is no {LINEAGE_JSON} and holds none; give that of an average")
    try:
        recorded = Recorded.model_validate({**found[0], "files": found[1]})
    except ValidationError as error:
        raise explain_validation(str(directory / LINEAGE_JSON), error) from None
    if len(recorded.factors) != len(recorded.ingredients):
        raise UserError(f"{directory / LINEAGE_JSON} has not one factor for every ingredient; restore it")
    start = directory.resolve().parent
    paths = [Path(os.path.normpath(start / each.path)) for each in recorded.ingredients]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{directory / LINEAGE_JSON}: its ingredient is not at {path}; restore it there")
    with _opened(paths, [out], processes) as ingredients:
        average = Average(out, recorded.method, recorded.factors, ingredients, recorded.accumulate, recorded.dtype)
        make(average, processes, label="average", recorded=recorded)


def _factors(count: int, weights: str | None, decay: float | None, window: int | None) -> tuple[str, tuple[float, ...]]:
    """Method and factors for `count` inputs."""
    if count < 2:
        raise UserError(f"{count} input(s), an average needs 2 or more; give HF directories or checkpoints")
    if window is not None:
        if not 2 <= window <= count:
            raise UserError(f"a window of {window} for {count} inputs; give --window from 2 to {count}")
        return "lawa", (1.0,) * window
    if decay is not None:
        if not 0 < decay < 1:
            raise UserError(f"decay {decay:g} is not between 0 and 1; leave --decay out for a uniform average")
        return "exponential", tuple(decay ** (count - 1 - index) for index in range(count))
    if weights is None:
        return "uniform", (1.0,) * count
    try:
        factors = tuple(float(weight) for weight in weights.split(","))
    except ValueError:
        raise UserError(f"--weights '{weights}' are not comma-separated numbers; give one per input") from None
    if len(factors) != count:
        raise UserError(f"{len(factors)} --weights for {count} inputs; give one per input")
    magnitude = sum(map(abs, factors))
    if not math.isfinite(magnitude) or math.fsum(factors) <= CANCELLED * magnitude:
        raise UserError(f"--weights '{weights}' are divided by their sum; give finite numbers with a positive sum")
    return "weighted", factors


@contextmanager
def _opened(inputs: list[Path], targets: list[Path], processes: int) -> Iterator[list[Ingredient]]:
    """The inputs, as long as the block lasts, if they agree with each other and with the place of the results."""
    real = [path.resolve() for path in inputs]
    for index, path in enumerate(real):
        if path in real[:index]:
            raise UserError(f"{inputs[index]} is given twice; give each input once, and --weights to count one more")
        for target in targets:
            if target.resolve().is_relative_to(path):
                raise UserError(f"{target} lies in the input {path}; give another directory to write")
    with tempfile.TemporaryDirectory() as scratch:
        ingredients = [open_ingredient(path, Path(scratch) / str(index), processes) for index, path in enumerate(real)]
        check_agreement(ingredients)
        yield ingredients


def _common_dtype(ingredients: list[Ingredient]) -> str:
    first, *others = ingredients
    for other in others:
        if other.dtype != first.dtype:
            raise UserError(
                f"the weights of {first.path} are {first.dtype}, those of {other.path} {other.dtype}; give the type to "
                f"write with --dtype"
            )
    return first.dtype
