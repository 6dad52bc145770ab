"""Models to average: opened, compared, and hash-checked, in one pass over their files where possible."""

import hashlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from torch import Tensor

from ckpt_tools.checkpoint import open_weights, verified_record
from ckpt_tools.export import copy_configuration
from ckpt_tools.formats.hf_weights import HFWeights, weight_files
from ckpt_tools.formats.parallel import each
from ckpt_tools.formats.weights import DTYPES, Weights, bytes_of
from ckpt_tools.forward import check_shapes, empty_model, read_config
from ckpt_tools.hf_directory import LINEAGE_JSON, TOKENIZER_FILES, read_lineage
from ckpt_tools.hf_model import EXPORTED_ARCHITECTURES, read_hf_config
from train.command import UserError, explain_validation
from train.run_directory import CHECKPOINT_JSON, FileRecord, sha256_of, verify_files

NOT_COMPARED = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")  # keys of config.json
DIGEST_BYTES = 32


class HashedWeights(HFWeights):
    """The weights of an HF directory, file after file, each as its bytes lie; hashed while they are read.

    A file whose tensors one process reads whole and in order costs no second pass. Digests lie in memory that is shared
    with forked processes. Not for several threads at once.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.stored = dict(sorted(self.stored.items(), key=lambda item: (item[1].path, item[1].offset)))
        paths = weight_files(directory)
        self._digests = mmap.mmap(-1, DIGEST_BYTES * len(paths))
        self._files = {
            path: _HashedFile(path, memoryview(self._digests)[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])
            for index, path in enumerate(paths)
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        rows, tensor = super().read(name, start, stop), self.stored[name]
        self._files[tensor.path].take(tensor.offset + start * tensor.described.row_bytes, bytes_of(rows))
        return rows

    def sha256(self, path: Path) -> str | None:
        """SHA-256 of one of its files, if it has been read whole."""
        return self._files[path].sha256


class _HashedFile:
    """SHA-256 over the bytes of a file from its beginning on, as far as they came in order."""

    def __init__(self, path: Path, digest: memoryview) -> None:
        self._path, self._digest, self._size = path, digest, path.stat().st_size
        with path.open("rb") as file:
            header = file.read(8)
            header += file.read(int.from_bytes(header, "little"))
        self._hash, self._position = hashlib.sha256(header), len(header)

    def take(self, begin: int, payload: memoryview) -> None:
        """Counts bytes that were read, if they go on where the last ones ended."""
        if begin != self._position or self.sha256:
            return
        self._hash.update(payload)
        self._position += len(payload)
        if self._position == self._size:
            self._digest[:] = self._hash.digest()

    @property
    def sha256(self) -> str | None:
        return self._digest.hex() if any(self._digest) else None


@dataclass(frozen=True)
class Ingredient:
    """A model that goes into an average.

    Attributes:
        path: its directory, without symbolic links.
        kind: an HF directory, or a checkpoint of either engine.
        weights: by HF name.
        dtype: of all weights, by its name in `DTYPES`.
        files: size and hash of the files that hold them, as recorded when they were written; none without a lineage.
        configuration: directory of its config.json and tokenizer.
        told: run, fingerprint, step, tokens and learning rate, as far as they are known.
    """

    path: Path
    kind: Literal["hf", "checkpoint"]
    weights: Weights
    dtype: str
    files: Mapping[str, FileRecord]
    configuration: Path
    told: Mapping[str, Any]


def open_ingredient(path: Path, scratch: Path, processes: int) -> Ingredient:
    """Opens an HF directory or a checkpoint.

    A checkpoint, which may hold pickles, is hash-checked first; the weights of an HF directory are not: see
    `verified_files`.

    Args:
        path: the directory.
        scratch: a new directory, for the configuration that a checkpoint is exported with.
        processes: at once.

    Raises:
        UserError: it is neither, it is damaged, or a checkpoint is not of the run beside it.
    """
    path = path.resolve()
    if (path / CHECKPOINT_JSON).is_file():
        return _open_checkpoint(path, scratch, processes)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds neither a model nor a checkpoint; give an HF directory or RUN/checkpoints/NAME")
    read_hf_config(path, EXPORTED_ARCHITECTURES)
    found = read_lineage(path)
    lineage, recorded = found or ({}, {})
    names = [file.name for file in weight_files(path)]
    unknown = [name for name in names if name not in recorded]
    if found and unknown:
        raise UserError(f"{path / unknown[0]} is not in {LINEAGE_JSON}; restore {path}, or make it again")
    others = {name: record for name, record in recorded.items() if name not in names}
    verify_files(path, others, f"restore {path}, or make it again")
    for name in names if found else ():
        size = (path / name).stat().st_size
        if size != recorded[name].bytes:
            raise UserError(f"{path / name} has {size} bytes instead of {recorded[name].bytes}; restore it")
    files = {name: recorded[name] for name in names} if found else {}
    weights = HashedWeights(path)
    return Ingredient(path, "hf", weights, dtype_of(weights, path), files, path, _told(lineage, path / LINEAGE_JSON))


def _open_checkpoint(path: Path, scratch: Path, processes: int) -> Ingredient:
    record = verified_record(path, processes)
    weights = open_weights(path, record)
    scratch.mkdir()
    dtype = dtype_of(weights, path)
    copy_configuration(scratch, path, record, dtype)
    told = _told(record.model_dump(), path / CHECKPOINT_JSON)
    return Ingredient(path, "checkpoint", weights, dtype, record.files, scratch, told)


class _Told(BaseModel):
    """What a lineage or a checkpoint's record tells of weights."""

    run: str | None = None
    fingerprint: str | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None


def _told(known: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """An import tells how far the weights were trained, but no run of ours that did it."""
    try:
        told = _Told.model_validate(known)
    except ValidationError as error:
        raise explain_validation(str(source), error) from None
    ours = known.get("imported") is None
    return told.model_dump(exclude_none=True, include=None if ours else {"step", "tokens"})


def dtype_of(weights: Weights, source: Path) -> str:
    """The one type of all weights, by its name in `DTYPES`; UserError naming a tensor of another."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    first, *others = weights.tensors.items()
    for name, tensor in (first, *others):
        if tensor.dtype not in names:
            raise UserError(f"{source}: '{name}' is {tensor.dtype}; only fp32, bf16 and fp16 weights are averaged")
        if tensor.dtype != first[1].dtype:
            raise UserError(f"{source}: '{name}' is {tensor.dtype}, '{first[0]}' {first[1].dtype}; convert one of them")
    return names[first[1].dtype]


def check_agreement(ingredients: list[Ingredient]) -> None:
    """UserError unless all are of one architecture and vocabulary, and each has all weights of it and no others.

    Compared are config.json as transformers understands it, without `NOT_COMPARED`, and all files of the tokenizer.
    """
    first, *others = ingredients
    config, tokenizer = _settings(first), _tokenizer(first)
    for other in others:
        for what, left, right in (
            ("config.json", config, _settings(other)),
            ("tokenizers", tokenizer, _tokenizer(other)),
        ):
            differing = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
            if differing:
                values = " (" + ", ".join(f"{side.get(differing[0])!r:.60}" for side in (left, right)) + ")"
                raise UserError(
                    f"{first.path} and {other.path} differ in '{differing[0]}' of their {what}"
                    f"{values * (what == 'config.json')}; average models of one architecture and tokenizer"
                )
    model = empty_model(read_config(first.configuration))
    for ingredient in ingredients:
        check_shapes(model, ingredient.weights, ingredient.path)


def _settings(ingredient: Ingredient) -> dict[str, Any]:
    settings = read_config(ingredient.configuration).to_dict()
    return {key: value for key, value in settings.items() if key not in NOT_COMPARED}


def _tokenizer(ingredient: Ingredient) -> dict[str, str]:
    paths = [ingredient.configuration / name for name in TOKENIZER_FILES]
    return {path.name: sha256_of(path) for path in paths if path.is_file()}


def verified_files(ingredients: list[Ingredient], processes: int) -> list[dict[str, FileRecord]]:
    """Size and SHA-256 of the weight files of every ingredient; those that were not hashed yet are hashed now.

    Raises:
        UserError: a file is not as its lineage says.
    """
    unread = [
        path
        for ingredient in ingredients
        if isinstance(ingredient.weights, HashedWeights)
        for path in weight_files(ingredient.path)
        if ingredient.weights.sha256(path) is None
    ]
    hashed = {unread[index]: digest for index, digest in each(sha256_of, unread, processes)}
    verified = []
    for ingredient in ingredients:
        files = dict(ingredient.files)
        if isinstance(ingredient.weights, HashedWeights):
            for path in weight_files(ingredient.path):
                sha256 = ingredient.weights.sha256(path) or hashed[path]
                found = files.setdefault(path.name, FileRecord(bytes=path.stat().st_size, sha256=sha256))
                if found.sha256 != sha256:
                    raise UserError(f"{path} was changed after it was written (its SHA-256 differs); restore it")
        verified.append(files)
    return verified
