"""Averages of models as HF directories: soups, weighted means and LAWA windows."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.environment import environment
from base.errors import UserError
from base.files import committed_directory, record_file, write_json
from ckpt_tools.averaging.inputs import Input, open_inputs
from ckpt_tools.averaging.sums import AveragedWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import default_processes, first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.directory import LINEAGE_JSON, TOKENIZER_FILES, read_lineage
from ckpt_tools.hf.forward import read_config, spread_ids, stream_logits
from ckpt_tools.hf.source import CONFIGURATION_FILES

SANITY_TOKENS = 8
CANCELLED = 1e-6  # a sum of factors this small beside their magnitudes is the rounding of 0


def average_models(
    out: Path,
    inputs: list[Path],
    *,
    weights: str | None = None,
    window: int | None = None,
    processes: int | None = None,
) -> None:
    """Write the average of models as an HF directory; its lineage.json comes last.

    The mean is that of `AveragedWeights`; its bytes do not depend on the number of processes.
    Type, configuration and tokenizer are the inputs'. With `window` = N, there is one average for
    every input but the first N - 1: the uniform mean of it and the N - 1 before it, at
    OUT/lawaN-<its name>. Whole averages are kept.

    Args:
        out: the directory to write, whole or not at all.
        inputs: HF directories of one architecture, type and tokenizer, oldest first, of one run or
            several.
        weights: comma-separated factors. A negative one extrapolates away from its input; the sum
            must be positive.
        window: number of inputs in a LAWA window.
        processes: at once; None: one per core.

    Raises:
        UserError: an input is damaged or does not fit the others, an option is impossible, the
            average is not finite, or `out` is something else.
    """
    processes = processes or default_processes()
    method, factors = _factors(len(inputs), weights, window)
    names = [f"lawa{window}-{path.resolve().name}" for path in inputs[len(factors) - 1 :]]
    targets = [out / name for name in names] if window else [out]
    if len(set(targets)) != len(targets):
        raise UserError(
            "two inputs have the same name, and so would their windows; average them from a"
            " directory each"
        )
    for path in inputs:
        if any(target.resolve().is_relative_to(path.resolve()) for target in targets):
            raise UserError(f"{out} lies in the input {path}; give another directory to write")
    models = open_inputs(inputs, processes)
    for first, target in enumerate(targets):
        members = models[first : first + len(factors)]
        _make(_Average(target, method, factors, members), processes)


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
    return "weighted", factors


@dataclass(frozen=True)
class _Average:
    """An average to make: its place, and the factors of its models, oldest first."""

    out: Path
    method: str
    factors: tuple[float, ...]
    inputs: list[Input]

    def lineage(self) -> dict[str, Any]:
        """Return what lineage.json tells of its origin.

        Of an average within one run these are run and fingerprint, and step, tokens and learning
        rate of the newest model.
        """
        facts = [one.facts for one in self.inputs]
        runs = {each.get("fingerprint") for each in facts}
        one_run = len(runs) == 1 and None not in runs and all("step" in each for each in facts)
        newest = max(facts, key=lambda each: each["step"]) if one_run else {}
        start = self.out.parent.resolve()
        return {
            "kind": "average",
            "method": self.method,
            "coefficients": [factor / math.fsum(self.factors) for factor in self.factors],
            "accumulate": "fp32",
            "dtype": self.inputs[-1].dtype,
            **newest,
            "steps": sorted({each["step"] for each in facts if "step" in each}),
            "ingredients": [
                {
                    "path": os.path.relpath(one.path, start),
                    **one.facts,
                    "files": {name: file.model_dump() for name, file in sorted(one.files.items())},
                }
                for one in self.inputs
            ],
        }


def _make(average: _Average, processes: int) -> None:
    """Write an average unless it is there already."""
    lineage = average.lineage()
    if _is_there(average.out, lineage, processes):
        return
    mean = AveragedWeights(
        [one.weights for one in average.inputs],
        average.factors,
        DTYPES[lineage["dtype"]],
    )
    with committed_directory(average.out) as aside:
        files = write_weights(aside, mean, processes=processes, label="average")
        for name in (*CONFIGURATION_FILES, *TOKENIZER_FILES):
            if (average.inputs[-1].path / name).is_file():
                shutil.copyfile(average.inputs[-1].path / name, aside / name)
                files[name] = record_file(aside / name)
        _check_forward(aside)
        listed = {name: record.model_dump() for name, record in sorted(files.items())}
        write_json(aside / LINEAGE_JSON, {**lineage, "files": listed, "environment": environment()})


def _is_there(out: Path, wanted: dict[str, Any], processes: int) -> bool:
    """Return whether the average is there whole; UserError if something else is."""
    if not out.exists():
        return False
    lineage, files = read_lineage(out) or ({}, {})
    if any(lineage.get(key) != value for key, value in wanted.items()):
        raise UserError(f"{out} exists and is not this average; give a new directory or remove it")
    return first_damage_in_parallel(out, files, processes) is None


def _check_forward(hf_dir: Path) -> None:
    """Raise UserError unless the model computes finite logits; nothing tells the right ones."""
    input_ids_BS = spread_ids(read_config(hf_dir).vocab_size, 1, SANITY_TOKENS)
    if not stream_logits(hf_dir, input_ids_BS).isfinite().all():
        raise UserError(
            "the average computes logits that are not finite, so it was not written; leave"
            " models out"
        )
