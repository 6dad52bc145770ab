"""Averages of models as HF directories: soups, weighted means and LAWA windows."""

import math
import os
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.progress import Progress
from ckpt_tools.averaging.inputs import Input, open_inputs
from ckpt_tools.averaging.sums import AveragedWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import is_whole
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.configuration import complete_configuration
from ckpt_tools.hf.directory import (
    CONFIGURATION_FILES,
    TOKENIZER_FILES,
    copy_files,
    may_be_restored,
    read_lineage,
    remade,
    write_lineage,
)
from ckpt_tools.hf.forward import read_config, spread_ids, stream_logits

SANITY_TOKENS = 8
CANCELLED = 1e-6  # a sum of factors this small beside their magnitudes is the rounding of 0


def average_models(
    out: Path,
    inputs: list[Path],
    *,
    weights: str | None = None,
    window: int | None = None,
) -> None:
    """Write the average of models as an HF directory; its lineage.json comes last.

    The mean is that of `AveragedWeights`. Type, configuration and tokenizer are the inputs'. With
    `window` = N, there is one average for every input but the first N - 1: the uniform mean of it
    and the N - 1 before it, at OUT/lawaN-<its name>. Whole averages are kept.

    Args:
        out: the directory to write, whole or not at all.
        inputs: HF directories of one architecture, type and tokenizer, oldest first, of one run or
            several.
        weights: comma-separated factors. A negative one extrapolates away from its input; the sum
            must be positive.
        window: number of inputs in a LAWA window.

    Raises:
        UserError: an input is damaged or does not fit the others, an option is impossible, the
            average is not finite, or `out` is something else.
    """
    method, factors = _factors(len(inputs), weights, window)

    # Bad targets are refused before a model is read.
    names = [f"lawa{window}-{path.resolve().name}" for path in inputs[len(factors) - 1 :]]
    targets = [out / name for name in names] if window else [out]
    if len(set(targets)) != len(targets):
        raise UserError(
            "two inputs have the same name, and so would their windows; average them from a"
            " directory each"
        )
    for path in inputs:
        if any(target.resolve().is_relative_to(path.resolve()) for target in targets):
            raise UserError(f"{out} is in the input {path}; give another directory to write")

    models = open_inputs(inputs)
    with Progress("average", total=len(targets)) as progress:
        for first, target in enumerate(targets):
            _make(target, method, factors, models[first : first + len(factors)])
            progress.advance()


def _factors(count: int, weights: str | None, window: int | None) -> tuple[str, tuple[float, ...]]:
    """Return method and factors for `count` inputs."""
    if count < 2:
        raise UserError(f"{count} input(s), an average needs 2 or more; give HF directories")

    if window is not None:
        if weights is not None or not 2 <= window <= count:
            raise UserError(
                f"a window of {window} for {count} inputs; give --window from 2 to {count}, without"
                " --weights"
            )
        return "lawa", (1.0,) * window
    if weights is None:
        return "uniform", (1.0,) * count
    return "weighted", _parse_weights(weights, count)


def _parse_weights(weights: str, count: int) -> tuple[float, ...]:
    """Return the factors in the text of --weights; UserError unless they are `count` usable ones.

    They are divided by their sum, which therefore must not cancel to zero.
    """
    try:
        factors = tuple(float(weight) for weight in weights.split(","))
    except ValueError:
        raise UserError(
            f"--weights '{weights}' are not comma-separated numbers; give one per input"
        ) from None
    if len(factors) != count:
        raise UserError(f"{len(factors)} --weights for {count} inputs; give one per input")

    magnitude = sum(map(abs, factors))
    if not math.isfinite(magnitude) or math.fsum(factors) <= CANCELLED * magnitude:
        raise UserError(
            f"--weights '{weights}' are divided by their sum; give finite numbers with a"
            " positive sum"
        )
    return factors


def _make(out: Path, method: str, factors: tuple[float, ...], inputs: list[Input]) -> None:
    """Write an average unless it is there already."""
    lineage = _lineage(out, method, factors, inputs)
    is_something = out.exists()
    if is_something and _is_there(out, lineage):
        return
    newest = inputs[-1]
    models = {model.path: model.weights for model in inputs}
    mean = AveragedWeights(models, factors, DTYPES[newest.dtype])
    with remade(out, damaged=is_something) as aside:
        files = write_weights(aside, mean)
        copy_files(newest.path, aside, (*CONFIGURATION_FILES, *TOKENIZER_FILES))
        complete_configuration(aside, newest.dtype)
        # No engine computed with these weights: the logits can only be checked to be finite.
        input_ids_BS = spread_ids(read_config(aside).vocab_size, 1, SANITY_TOKENS)
        if not stream_logits(aside, input_ids_BS).isfinite().all():
            raise UserError(
                "the average computes logits that are not finite, so it was not written; leave"
                " models out"
            )
        write_lineage(aside, lineage, files)


def _is_there(out: Path, lineage: dict[str, Any]) -> bool:
    """Return whether `out` is this average, undamaged; UserError if it is something else."""
    if may_be_restored(out):
        return False
    present, files = read_lineage(out) or ({}, {})
    if any(present.get(key) != value for key, value in lineage.items()):
        raise UserError(f"{out} exists and is not this average; give a new directory")
    return is_whole(out, files)


def _lineage(
    out: Path, method: str, factors: tuple[float, ...], inputs: list[Input]
) -> dict[str, Any]:
    """Return the origin of an average, as lineage.json records it.

    An average within one run has its run and fingerprint, and step, tokens and learning rate of the
    newest model.
    """
    facts = [model.facts for model in inputs]
    runs = {fact.get("fingerprint") for fact in facts}
    is_one_run = len(runs) == 1 and None not in runs and all("step" in fact for fact in facts)
    return {
        "kind": "average",
        "method": method,
        "coefficients": [factor / math.fsum(factors) for factor in factors],
        "accumulate": "fp32",
        "dtype": inputs[-1].dtype,
        **(max(facts, key=lambda fact: fact["step"]) if is_one_run else {}),
        "steps": sorted({fact["step"] for fact in facts if "step" in fact}),
        "ingredients": [
            {
                "path": os.path.relpath(model.path, out.parent.resolve()),
                **model.facts,
                "files": {name: file.model_dump() for name, file in sorted(model.files.items())},
            }
            for model in inputs
        ],
    }
