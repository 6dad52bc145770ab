"""Writing an average of models as an HF directory with the lineage that it can be made again from."""

import math
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, FiniteFloat

from ckpt_tools.averaging.ingredients import HashedWeights, Ingredient, verified_files
from ckpt_tools.averaging.sums import AveragedWeights
from ckpt_tools.formats.hf_writer import SHARD_BYTES, Shard, divide, write_files
from ckpt_tools.formats.parallel import first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES, Described
from ckpt_tools.forward import read_config, spread_ids, stream_logits
from ckpt_tools.hf_configuration import change_dtype
from ckpt_tools.hf_directory import LINEAGE_JSON, TOKENIZER_FILES, read_lineage
from ckpt_tools.hf_source import CONFIGURATION_FILES
from train.command import UserError
from train.run_directory import FileRecord, committed_directory, record_file, write_json
from train.tracking import environment

ACCUMULATE = {"fp32": torch.float32, "fp64": torch.float64}
SANITY_TOKENS = 8


@dataclass(frozen=True)
class Average:
    """What to make: where, by which factors, of which models.

    Attributes:
        out: HF directory.
        method: uniform, weighted, exponential or lawa.
        factors: one per ingredient; their sum divides.
        ingredients: oldest first.
        accumulate: key of `ACCUMULATE`.
        dtype: key of `DTYPES`.
    """

    out: Path
    method: str
    factors: tuple[float, ...]
    ingredients: list[Ingredient]
    accumulate: str
    dtype: str

    def lineage(self, files: list[dict[str, FileRecord]]) -> dict[str, Any]:
        """What lineage.json tells; `files` are those of the ingredients' weights.

        Of an average within one run, run and fingerprint, and step, tokens and learning rate of the newest ingredient.
        """
        told = [ingredient.told for ingredient in self.ingredients]
        one_run = len({each.get("fingerprint") for each in told}) == 1 and all("step" in each for each in told)
        newest = max(told, key=lambda each: each["step"]) if one_run and "fingerprint" in told[0] else {}
        start = self.out.parent.resolve()
        return {
            "kind": "average",
            "method": self.method,
            "coefficients": [factor / math.fsum(self.factors) for factor in self.factors],
            "factors": list(self.factors),
            "accumulate": self.accumulate,
            "dtype": self.dtype,
            **newest,
            "steps": sorted({each["step"] for each in told if "step" in each}),
            "ingredients": [
                {
                    "path": os.path.relpath(ingredient.path, start),
                    "kind": ingredient.kind,
                    **ingredient.told,
                    "files": {name: record.model_dump() for name, record in sorted(records.items())},
                }
                for ingredient, records in zip(self.ingredients, files, strict=True)
            ],
        }


class RecordedIngredient(BaseModel):
    """An ingredient in the lineage of an average; its path starts where the average's directory lies."""

    path: str
    files: dict[str, FileRecord]


class Recorded(BaseModel):
    """What the lineage of an average says that it can be made again from; see `Average`."""

    kind: Literal["average"]
    method: str
    factors: tuple[FiniteFloat, ...]
    accumulate: Literal["fp32", "fp64"]
    dtype: Literal["fp32", "bf16", "fp16"]
    ingredients: list[RecordedIngredient]
    files: dict[str, FileRecord]

    def check(self, average: Average, ingredients: list[dict[str, FileRecord]], made: dict[str, FileRecord]) -> None:
        """UserError naming the first file of an ingredient, or else of the weights that were made, that is another."""
        for one, found, recorded in zip(average.ingredients, ingredients, self.ingredients, strict=True):
            for name in sorted(found.keys() | recorded.files.keys()):
                if found.get(name) != recorded.files.get(name):
                    raise UserError(f"{one.path / name} is not what the average was made from; restore it")
        for name, record in made.items():
            if record != self.files.get(name):
                raise UserError(
                    f"{name} comes out otherwise than the lineage says (its SHA-256 differs), so nothing was written; "
                    f"restore lineage.json, or make a new average of the same inputs"
                )


def make(average: Average, processes: int, label: str | None, recorded: Recorded | None = None) -> None:
    """Writes an average unless it is there already.

    Args:
        average: what to make.
        processes: at once.
        label: of a progress bar over the files; None: there is none.
        recorded: what has to come out; None: that is not known.

    Raises:
        UserError: an ingredient is damaged or not as recorded, the result is not finite or not as recorded, or
            something else is in its place.
    """
    if _is_there(average, processes):
        return
    with committed_directory(average.out) as aside:
        files = _write_weights(aside, average, processes, label)
        verified = verified_files(average.ingredients, processes)
        if recorded:
            recorded.check(average, verified, files)
        source = average.ingredients[-1].configuration
        for name in (*CONFIGURATION_FILES, *TOKENIZER_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
        change_dtype(aside, average.dtype)
        _check_forward(aside)
        others = {path.name for path in aside.iterdir()} - files.keys()
        files |= {name: record_file(aside / name) for name in others}
        listed = {name: record.model_dump() for name, record in sorted(files.items())}
        lineage = {**average.lineage(verified), "files": listed, "environment": environment()}
        write_json(aside / LINEAGE_JSON, lineage)


def _is_there(average: Average, processes: int) -> bool:
    """Whether the average is there whole; UserError if something else is."""
    if not average.out.exists():
        return False
    lineage, files = read_lineage(average.out) or ({}, {})
    wanted = average.lineage(verified_files(average.ingredients, processes))
    if any(lineage.get(key) != value for key, value in wanted.items()):
        raise UserError(f"{average.out} exists and is not this average; give a new directory or remove it")
    return first_damage_in_parallel(average.out, files, processes) is None


def _write_weights(directory: Path, average: Average, processes: int, label: str | None) -> dict[str, FileRecord]:
    """Writes the weights, divided into files as those of the last ingredient if it is an HF directory."""
    dtype, last = DTYPES[average.dtype], average.ingredients[-1].weights
    described = {name: Described(tensor.shape, dtype) for name, tensor in last.tensors.items()}
    if isinstance(last, HashedWeights):  # one process then reads a whole file of every ingredient, if all are alike
        by_file: dict[str, dict[str, Described]] = defaultdict(dict)
        for name, tensor in last.stored.items():
            by_file[tensor.path.name][name] = described[name]
        shards = [Shard(name, tensors) for name, tensors in by_file.items()]
    else:
        shards = divide(described, SHARD_BYTES)
    weights = AveragedWeights(
        average.ingredients,
        average.factors,
        accumulate=ACCUMULATE[average.accumulate],
        dtype=dtype,
        threads=max(1, processes // len(shards)),
    )
    return write_files(directory, shards, weights, processes=processes, label=label)


def _check_forward(hf_dir: Path) -> None:
    """UserError unless the model computes finite logits; what they should be no engine has told."""
    input_ids_BS = spread_ids(read_config(hf_dir).vocab_size, 1, SANITY_TOKENS)
    if not stream_logits(hf_dir, input_ids_BS).isfinite().all():
        raise UserError("the average computes logits that are not finite, so it was not written; leave models out")
