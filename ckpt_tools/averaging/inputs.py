"""Models that an average is made of: opened, hash-checked, and compared with each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from base.errors import UserError, explain_validation
from base.files import FileRecord, record_file, sha256_of
from ckpt_tools.formats.hf_weights import HFWeights, weight_files
from ckpt_tools.formats.parallel import each, first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.directory import LINEAGE_JSON, TOKENIZER_FILES, read_lineage
from ckpt_tools.hf.forward import check_shapes, empty_model, read_config
from ckpt_tools.hf.model import EXPORTED_ARCHITECTURES, read_hf_config

NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}  # of config.json


class Facts(BaseModel):
    """Origin of a model, as far as its lineage tells."""

    run: str | None = None
    fingerprint: str | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Input:
    """A model to average.

    Attributes:
        path: its HF directory, without symbolic links.
        weights: by HF name.
        dtype: of all weights, by its name in `DTYPES`.
        files: size and hash of the files that hold them.
        facts: those of `Facts` that are known.
    """

    path: Path
    weights: HFWeights
    dtype: str
    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any]


def open_inputs(paths: list[Path], processes: int) -> list[Input]:
    """Open HF directories that agree in architecture, type, vocabulary and tokenizer.

    Raises:
        UserError: one is no HF directory, is damaged, is given twice, or differs from the others.
    """
    real = [path.resolve() for path in paths]
    for index, path in enumerate(real):
        if path in real[:index]:
            raise UserError(f"{paths[index]} is given twice; give each input once")
    inputs = [_open(path, processes) for path in real]
    _check_agreement(inputs)
    return inputs


def _open(path: Path, processes: int) -> Input:
    read_hf_config(path, EXPORTED_ARCHITECTURES)
    lineage, recorded = read_lineage(path) or ({}, {})
    names = [file.name for file in weight_files(path)]
    unknown = [name for name in names if name not in recorded] if lineage else []
    if unknown:
        raise UserError(
            f"{path / unknown[0]} is not in {LINEAGE_JSON}; restore {path}, or make it again"
        )
    damage = first_damage_in_parallel(path, recorded, processes)
    if damage:
        raise UserError(f"{damage}; restore {path}, or make it again")
    hashed = each(lambda name: record_file(path / name), () if lineage else names, processes)
    files = recorded or {names[index]: record for index, record in hashed}
    weights = HFWeights(path)
    return Input(
        path=path,
        weights=weights,
        dtype=_dtype_of(weights),
        files={name: files[name] for name in names},
        facts=_facts(path, lineage),
    )


def _facts(path: Path, lineage: dict[str, Any]) -> dict[str, Any]:
    """Return step and tokens, and the run if it is one of ours, which no import is."""
    try:
        facts = Facts.model_validate(lineage)
    except ValidationError as error:
        raise explain_validation(str(path / LINEAGE_JSON), error) from None
    ours = lineage.get("imported") is None
    return facts.model_dump(exclude_none=True, include=None if ours else {"step", "tokens"})


def _dtype_of(weights: HFWeights) -> str:
    """Return the one type of all weights, by its name in `DTYPES`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    first, *others = weights.tensors.items()
    for name, tensor in (first, *others):
        if tensor.dtype not in names:
            raise UserError(
                f"{weights.directory}: '{name}' is {tensor.dtype}; only fp32, bf16 and fp16 weights"
                " are averaged"
            )
        if tensor.dtype != first[1].dtype:
            raise UserError(
                f"{weights.directory}: '{name}' is {tensor.dtype}, '{first[0]}' {first[1].dtype};"
                " convert one of them"
            )
    return names[first[1].dtype]


def _check_agreement(inputs: list[Input]) -> None:
    """Raise UserError unless all are of one architecture, type and tokenizer, with all weights.

    Compared are config.json as transformers understands it, without `NOT_COMPARED`, and all files
    of the tokenizer.
    """
    first, *others = inputs
    for other in others:
        if other.dtype != first.dtype:
            raise UserError(
                f"the weights of {first.path} are {first.dtype}, those of {other.path}"
                f" {other.dtype}; export them in one type with --dtype"
            )
        for what, describe in (("config.json", _settings), ("tokenizers", _tokenizer)):
            left, right = describe(first.path), describe(other.path)
            keys = sorted(left.keys() | right.keys())
            differing = next((key for key in keys if left.get(key) != right.get(key)), None)
            if differing is not None:
                values = f" ({left.get(differing)!r:.60}, {right.get(differing)!r:.60})"
                raise UserError(
                    f"{first.path} and {other.path} differ in '{differing}' of their"
                    f" {what}{values * (what == 'config.json')}; average models of one architecture"
                    " and tokenizer"
                )
    model = empty_model(read_config(first.path))
    for one in inputs:
        check_shapes(model, one.weights, one.path)


def _settings(path: Path) -> dict[str, Any]:
    settings = read_config(path).to_dict()
    return {key: value for key, value in settings.items() if key not in NOT_COMPARED}


def _tokenizer(path: Path) -> dict[str, Any]:
    files = [path / name for name in TOKENIZER_FILES]
    return {file.name: sha256_of(file) for file in files if file.is_file()}
