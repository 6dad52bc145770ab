"""Averages of models as HF directories: soups, weighted means, LAWA windows, emulated decays.

`average_models` is the command. The models are opened, hash-checked and compared with each other
(`open_inputs`), then summed some rows at a time (`AveragedWeights`), in memory that does not grow
with their number. Every operation is one of IEEE 754 that rounds once, in an order that is fixed:
the same bits on every machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from base.errors import UserError, explain_validation
from base.files import FileRecord, sha256_of
from base.progress import Progress
from ckpt_tools.emulated_decay import decay_coefficients, describe_decay
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import each, hash_in_parallel, is_whole, verify_in_parallel
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.formats.weights import DTYPES, Described, Weights, dtype_of
from ckpt_tools.hf.configuration import complete_configuration, read_config
from ckpt_tools.hf.directory import (
    CONFIGURATION_FILES,
    LINEAGE_JSON,
    REMAKE,
    TOKENIZER_FILES,
    copy_files,
    may_be_restored,
    read_download,
    read_lineage,
    remade,
    write_lineage,
)
from ckpt_tools.hf.forward import (
    check_shapes,
    copies_in_files,
    empty_model,
    spread_ids,
    stream_logits,
)
from ckpt_tools.hf.model import read_hf_config
from train.model.families import ARCHITECTURES
from train.run.optimization import Ema, Lawa, Shape

METHODS = {
    "uniform": "uniform mean",
    "weighted": "weighted mean",
    "lawa": "LAWA window, the uniform mean",
}
DECAY: dict[str, Shape] = {f"decay-{shape}": shape for shape in get_args(Shape)}  # by method
SANITY_TOKENS = 8
CANCELLED = 1e-6  # a sum of factors this small beside their magnitudes is the rounding of 0
NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}  # of config.json


def average_models(
    out: Path,
    inputs: list[Path],
    *,
    weights: str | None = None,
    window: int | None = None,
    decay: Shape | None = None,
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
        decay: of the learning rate from the first input to the last, which are exports of one run;
            the average emulates it (`ckpt_tools.emulated_decay`).

    Raises:
        UserError: an input is damaged or does not fit the others, an option is impossible, the
            average is not finite, or `out` is something else.
    """
    method, factors = _factors(inputs, weights, window, decay)

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
        # Windows overlap: target i is the mean of inputs i to i + N - 1.
        for first, target in enumerate(targets):
            _make(target, method, factors, models[first : first + len(factors)])
            progress.advance()
    lineage, _ = read_lineage(targets[-1]) or ({}, {})
    several = f"{len(targets)} averages, each a " if len(targets) > 1 else ""
    print(f"{several}{describe(lineage)}: {out}")


def describe(lineage: dict[str, Any]) -> str | None:
    """Return in words what average a model is, by its lineage; None for plain weights.

    An average of models is made here, one of a run's own weights was kept while it trained.

    Example:
        >>> describe({"kind": "average", "method": "lawa", "coefficients": [0.5, 0.5]})
        'LAWA window, the uniform mean of 2 models'
        >>> describe({"kind": "export", "average": {"kind": "ema", "decay": 0.9, "steps": [2, 8]}})
        'EMA, decay 0.9 every 1 steps'
    """
    if lineage["kind"] == "average":
        method = lineage["method"]
        if method in DECAY:
            return describe_decay(lineage["steps"], DECAY[method])
        return f"{METHODS[method]} of {len(lineage['coefficients'])} models"
    match lineage.get("average"):
        case None:
            return None
        case {"kind": "lawa", "steps": _, **settings}:
            return Lawa.model_validate(settings).describe()
        case {"kind": "ema", "steps": _, **settings}:
            return Ema.model_validate(settings).describe()
        case other:
            raise UserError(f"lineage.json has an average of no known kind ({other}); {REMAKE}")


def _factors(
    inputs: list[Path], weights: str | None, window: int | None, decay: Shape | None
) -> tuple[str, tuple[float, ...]]:
    """Return method and factors for the inputs."""
    count = len(inputs)
    if count < 2:
        raise UserError(f"{count} input(s), an average needs 2 or more; give HF directories")

    if decay is not None:
        if weights is not None or window is not None:
            raise UserError(
                "--decay fixes the weights of all inputs; leave --weights and --window out"
            )
        return f"decay-{decay}", decay_coefficients(_steps_of_one_run(inputs), decay)
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


def _steps_of_one_run(paths: list[Path]) -> list[int]:
    """Return the steps of exports of one run; UserError unless they are such, oldest first."""
    facts = []
    for path in paths:
        lineage, _ = read_lineage(path) or ({}, {})
        facts.append(_facts(path, lineage))
        if not {"run", "fingerprint", "step"} <= facts[-1].keys():
            raise UserError(
                f"{path} has no lineage.json with a run and a step of it, by which --decay weighs;"
                " give exports of one run"
            )
        if describe(lineage):
            raise UserError(f"{path} is an average itself; give the run's own weights to --decay")

    if len({fact["fingerprint"] for fact in facts}) > 1:
        names = ", ".join(dict.fromkeys(fact["run"] for fact in facts))
        raise UserError(f"the inputs are of several runs ({names}); give --decay exports of one")
    steps = [fact["step"] for fact in facts]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise UserError(
            f"the steps {', '.join(map(str, steps))} do not rise; give --decay each once, oldest"
            " first"
        )
    return steps


def _make(out: Path, method: str, factors: tuple[float, ...], inputs: list[AveragingInput]) -> None:
    """Write an average unless it is there already."""
    lineage = _lineage(out, method, factors, inputs)
    is_something = out.exists()
    if is_something and _is_there(out, lineage):
        return
    newest = inputs[-1]
    models = {model.path: model.weights for model in inputs}
    mean = AveragedWeights(models, factors, DTYPES[newest.dtype])
    # What `_is_there` did not refuse is this average, damaged, or has no lineage to tell.
    with remade(out, damaged=is_something) as aside:
        files = write_weights(aside, mean)
        # All inputs agree in config.json and tokenizer; the newest stands for all.
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
    out: Path, method: str, factors: tuple[float, ...], inputs: list[AveragingInput]
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


class Facts(BaseModel):
    """Origin of a model, as far as its lineage records it."""

    run: str | None = None
    fingerprint: str | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class AveragingInput:
    """A model to average."""

    path: Path
    weights: HFWeights
    dtype: str
    files: dict[str, FileRecord]
    facts: dict[str, Any]


def open_inputs(paths: list[Path]) -> list[AveragingInput]:
    """Open HF directories that agree in architecture, type, vocabulary and tokenizer.

    Raises:
        UserError: one is no HF directory, is damaged, is given twice, or differs from the others.
    """
    # Resolved, so that a link to an input counts as that input.
    real = [path.resolve() for path in paths]
    for index, path in enumerate(real):
        if path in real[:index]:
            raise UserError(f"{paths[index]} is given twice; give each input once")
    first, *others = inputs = list(each(_open, real).values())
    for other in others:
        _check_agreement(first, other)
    model = empty_model(read_config(first.path))
    for source in inputs:
        check_shapes(model, source.weights, source.path)
        for name in copies_in_files(model, source.weights):
            del source.weights.tensors[name]  # others may lack it
    return inputs


def _open(path: Path) -> AveragingInput:
    read_hf_config(path, ARCHITECTURES)
    lineage, recorded = read_lineage(path) or ({}, {})
    download = read_download(path)
    recorded = recorded | (download.files if download else {})
    verify_in_parallel(path, recorded, f"restore {path}, or make it again")
    origin = download.model_dump(include={"repo", "revision", "commit"}) if download else {}
    weights = HFWeights(path)
    return AveragingInput(
        path=path,
        weights=weights,
        dtype=dtype_of(weights, tuple(DTYPES), path),
        files=hash_in_parallel(path, [file.name for file in weight_files(path)], recorded),
        facts=origin | _facts(path, lineage),
    )


def _facts(path: Path, lineage: dict[str, Any]) -> dict[str, Any]:
    """Return the origin of a model by its lineage, as far as it is recorded."""
    try:
        facts = Facts.model_validate(lineage)
    except ValidationError as error:
        raise explain_validation(str(path / LINEAGE_JSON), error) from None
    # The run of an import is not ours.
    fields = {"step", "tokens"} if lineage.get("imported") else None
    return facts.model_dump(exclude_none=True, include=fields)


def _check_agreement(first: AveragingInput, other: AveragingInput) -> None:
    """Raise UserError unless both are of one type, config.json and tokenizer."""
    if other.dtype != first.dtype:
        raise UserError(
            f"the weights of {first.path} are {first.dtype}, those of {other.path} {other.dtype};"
            " average models of one type"
        )
    for what, describe in (("config.json", _settings), ("tokenizers", _tokenizer)):
        first_values, other_values = describe(first.path), describe(other.path)
        keys = sorted(first_values.keys() | other_values.keys())
        differing = next(
            (key for key in keys if first_values.get(key) != other_values.get(key)), None
        )
        if differing is not None:
            first_value, other_value = first_values.get(differing), other_values.get(differing)
            raise UserError(
                f"{first.path} and {other.path} differ in '{differing}' of their {what}"
                f" ({first_value!r:.60}, {other_value!r:.60}); average models of one architecture"
                " and tokenizer"
            )


def _settings(path: Path) -> dict[str, Any]:
    settings = read_config(path).to_dict()
    return {key: value for key, value in settings.items() if key not in NOT_COMPARED}


def _tokenizer(path: Path) -> dict[str, Any]:
    files = [path / name for name in TOKENIZER_FILES]
    return {file.name: sha256_of(file) for file in files if file.is_file()}


class AveragedWeights:
    """sum_i f_i theta_i / sum_i f_i, summed in the order of the models, rounded to `dtype` once.

    Each product and each sum is rounded to fp32 (no fused multiply-add), then the quotient. For n
    models and u = 2^-24 the error before the last rounding is at most (n + 2) u sum_i |f_i theta_i|
    / sum_i f_i to first order (Higham, Accuracy and Stability, section 4.2); factors of 1 multiply
    exactly. Only the ratios of the factors count, not their size. An instance is a
    `ckpt_tools.formats.weights.Weights`.

    Raises:
        UserError: in `read`, if a number of the result is not finite.

    Example: 2 x 1.5 - 0.5, a step away from the older model.
        >>> class Stored:
        ...     def __init__(self, value):
        ...         self.tensors = {"w": torch.full((2, 1), value)}
        ...     def read(self, name, start, stop):
        ...         return self.tensors[name][start:stop]
        >>> models = {Path("older"): Stored(0.5), Path("newer"): Stored(1.5)}
        >>> AveragedWeights(models, (-1.0, 2.0), torch.float32).read("w", 0, 2).tolist()
        [[2.5], [2.5]]
    """

    def __init__(
        self, models: Mapping[Path, Weights], factors: Sequence[float], dtype: torch.dtype
    ) -> None:
        self._models = models
        # The largest goes to [1, 2) by a power of two, which is exact: fp32 holds what counts.
        exponent = math.frexp(max(map(abs, factors)))[1] - 1
        scaled = [math.ldexp(factor, -exponent) for factor in factors]
        self._factors = [torch.tensor(factor, dtype=torch.float32) for factor in scaled]
        self._sum = torch.tensor(math.fsum(scaled), dtype=torch.float32)
        newest = [*models.values()][-1].tensors
        self.tensors = {name: Described(tensor.shape, dtype) for name, tensor in newest.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the mean."""
        tensor = self.tensors[name]
        # Adding to -0 is exact, also for -0.
        total = torch.full((stop - start, *tensor.shape[1:]), -0.0, dtype=torch.float32)
        for model, factor in zip(self._models.values(), self._factors, strict=True):
            wide = model.read(name, start, stop).float()
            # A fused multiply-add, as `alpha` allows, would not round the product.
            total += wide if factor == 1 else wide * factor
        rows = total.div_(self._sum).to(tensor.dtype)
        if not rows.isfinite().all():
            # Read once more, to tell a bad input from an overflow of the sum.
            for path, model in self._models.items():
                if not model.read(name, start, stop).isfinite().all():
                    raise UserError(f"'{name}' is not finite in {path}; leave that model out")
            raise UserError(f"'{name}' overflows in the average; give other models or --weights")
        return rows
