"""Models to average: opened, hash-checked, and compared with each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from base.errors import UserError, explain_validation
from base.files import FileRecord, sha256_of
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.parallel import each, hash_in_parallel, verify_in_parallel
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.formats.weights import DTYPES, dtype_of
from ckpt_tools.hf.directory import LINEAGE_JSON, TOKENIZER_FILES, read_lineage
from ckpt_tools.hf.forward import check_shapes, copies_in_files, empty_model, read_config
from ckpt_tools.hf.model import EXPORTED_ARCHITECTURES, read_hf_config

NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}  # of config.json


class Facts(BaseModel):
    """Origin of a model, as far as its lineage records it."""

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
    files: dict[str, FileRecord]
    facts: dict[str, Any]


def open_inputs(paths: list[Path]) -> list[Input]:
    """Open HF directories that agree in architecture, type, vocabulary and tokenizer.

    Raises:
        UserError: one is no HF directory, is damaged, is given twice, or differs from the others.
    """
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


def _open(path: Path) -> Input:
    read_hf_config(path, EXPORTED_ARCHITECTURES)
    lineage, recorded = read_lineage(path) or ({}, {})
    verify_in_parallel(path, recorded, f"restore {path}, or make it again")
    try:
        facts = Facts.model_validate(lineage)
    except ValidationError as error:
        raise explain_validation(str(path / LINEAGE_JSON), error) from None
    # The run of an import is not ours.
    fields = {"step", "tokens"} if lineage.get("imported") else None
    weights = HFWeights(path)
    return Input(
        path=path,
        weights=weights,
        dtype=dtype_of(weights, tuple(DTYPES), path),
        files=hash_in_parallel(path, [file.name for file in weight_files(path)], recorded),
        facts=facts.model_dump(exclude_none=True, include=fields),
    )


def _check_agreement(first: Input, other: Input) -> None:
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
