"""Quantized checkpoints: one is saved, and read back, with one linear in memory at a time.

Shapes: O output features, I input features.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from base.environment import environment
from base.errors import UserError
from base.files import committed_directory, record_file, scratch_directory, write_sealed
from base.reading import read_object
from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.hf_writer import SHARD_BYTES, write_weights
from ckpt_tools.formats.weights import DTYPES, Described, FileTensor, read_whole
from ckpt_tools.hf.configuration import complete_configuration, read_config
from ckpt_tools.hf.directory import (
    CONFIGURATION_FILES,
    LINEAGE_JSON,
    TOKENIZER_FILES,
    read_lineage,
)
from ckpt_tools.hf.forward import empty_model, names_in_files
from quant_eval.group import Rounded
from quant_eval.model.streamed import Block
from quant_eval.quantizer import QuantSpec
from quant_eval.saved.compressed import CompressedFormat
from quant_eval.saved.gptq import GPTQFormat, GPTQSettings, settings_of
from quant_eval.transforms.steps import Transform
from train.model.families import family_of

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PretrainedConfig

SETTINGS = "quantization_config"  # key of config.json
KIND = "quantized"  # in lineage.json

SavedFormat = CompressedFormat | GPTQFormat


def format_of(spec: QuantSpec, head: str, config: "PretrainedConfig") -> SavedFormat:
    """Return GPTQ's format for specs with fp16 scales, compressed-tensors' for all others.

    `head` is the name of the model's output head, `config` its configuration. UserError if the
    format cannot hold the spec.
    """
    if spec.scales == "fp16":
        return GPTQFormat(settings_of(spec))
    return CompressedFormat.of_spec(spec, head, config)


def read_format(settings: dict[str, Any]) -> SavedFormat:
    """Return the format of a saved checkpoint from its `quantization_config`."""
    if settings["quant_method"] == "gptq":
        return GPTQFormat(GPTQSettings.model_validate(settings))
    return CompressedFormat.read(settings)


@dataclass(frozen=True)
class _Merged:
    """Weights of several files, each to be written in a type of its own."""

    stored: Mapping[str, FileTensor]
    tensors: Mapping[str, Described]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.stored[name].read(start, stop)


class CheckpointWriter:
    """An HF directory in which decoder linears are packed codes, all else as in its source.

    Specs with fp16 scales are written in GPTQ's format, all others in compressed-tensors'. Packed
    linears wait in a directory beside `out` until the last one is there; `out` appears whole
    or not at all.

    Example:
        with CheckpointWriter(hf_dir, out, spec, "fp32").collecting() as writer:
            for index, block in enumerate(quantized):
                for name, rounded, transform in codes_of(block):
                    writer.add(name, rounded, transform)
                writer.add_block(index, block)
            writer.finish({"model": identify(hf_dir)})
    """

    def __init__(
        self, hf_dir: Path, out: Path, spec: QuantSpec, dtype: Literal["fp32", "bf16"]
    ) -> None:
        """Check everything that can be checked before a linear is quantized.

        `dtype` is that of all tensors that are not packed. UserError if the spec or a linear does
        not fit the format, or something else than a quantized checkpoint is at `out`.
        """
        self.hf_dir, self.out, self.spec = hf_dir, out, spec
        # `finish` replaces what is at `out`: it may be an earlier checkpoint, and nothing else.
        if out.exists() and (read_lineage(out) or ({}, {}))[0].get("kind") != KIND:
            raise UserError(f"{out} exists and is not a quantized checkpoint; give a new directory")
        model = empty_model(read_config(hf_dir))
        if not family_of(model.config).in_transformers:
            raise UserError(
                f"no engine reads a checkpoint of {model.config.model_type}, whose class only this"
                " project has; leave out --save, or give --dense"
            )
        tensors, head = model.state_dict(), model.get_output_embeddings()
        self._shapes = {
            file: tuple(tensors[name].shape) for name, file in names_in_files(model).items()
        }
        head_name = next(name for name, part in model.named_modules() if part is head)
        self._format = format_of(spec, head_name, model.config)
        linears = {
            name: part
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) and part is not head
        }
        self._format.check_linears(linears)
        is_packed = spec.rounds_weights
        self._pending = {f"{name}.weight" for name in linears} if is_packed else set[str]()
        self.dtype = dtype
        self._packed: dict[str, dict[str, FileTensor]] = {}
        self._others: dict[str, FileTensor] = {}

    @contextmanager
    def collecting(self) -> Iterator[Self]:
        """Keep packed linears in a directory of their own while the context lasts."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(self.out.parent / f".{self.out.name}.packed") as self._aside:
            yield self

    def add(self, name: str, rounded: Rounded, transform: Transform | None = None) -> None:
        """Take a linear by its parameter's name: each once, in any order.

        Groups are of `group_size` inputs each, and in the range of the scales. `transform` is that
        of the inputs, in whose basis the codes are; None: the model's own.
        """
        assert name in self._pending, (
            f"{name} is not a linear of a decoder block, or was added before"
        )
        assert transform is not None or not self.spec.is_transformed, "of which basis?"
        self._pending.remove(name)
        linear = name.removesuffix(".weight")
        self._packed[name] = self._set_aside(linear, self._format.pack(linear, rounded, transform))

    def add_block(self, index: int, block: Block) -> None:
        """Take the fixed scales of a quantized block's activations and cache: each block once."""
        tensors = self._format.block_tensors(block)
        if tensors:
            self._others |= self._set_aside(f"block{index}", tensors)

    def _set_aside(self, name: str, tensors: dict[str, Tensor]) -> dict[str, FileTensor]:
        path = self._aside / f"{name}.safetensors"
        save_file(tensors, path)
        return read_header(path)

    def finish(self, lineage: Mapping[str, Any]) -> None:
        """Write `out`: shards, configuration, tokenizer, lineage.json last.

        `lineage` is the rest of its content, besides spec, layout and files.
        """
        assert not self._pending, f"not added: {sorted(self._pending)}"

        # packed linears in place of their weights, all else in the dtype of the measurement
        stored: dict[str, FileTensor] = {}
        tensors: dict[str, Described] = {}
        for name, tensor in HFWeights(self.hf_dir).tensors.items():
            if name not in self._shapes:
                continue  # the head of a tied model, once more
            packed = self._packed.get(name)
            if packed:
                stored |= packed
                tensors |= packed
            else:
                dtype = DTYPES[self.dtype] if tensor.dtype.is_floating_point else tensor.dtype
                stored[name], tensors[name] = tensor, Described(self._shapes[name], dtype)
        stored |= self._others
        tensors |= self._others

        with committed_directory(self.out) as aside:
            files = write_weights(aside, _Merged(stored, tensors), shard_bytes=SHARD_BYTES)
            for name in (*CONFIGURATION_FILES, *TOKENIZER_FILES):
                if (self.hf_dir / name).is_file():
                    shutil.copyfile(self.hf_dir / name, aside / name)

            # config.json as a reader of the packed weights needs it
            complete_configuration(aside, self.dtype, **{SETTINGS: self._format.settings})

            # last, for it has the hashes of all other files
            others = {path.name for path in aside.iterdir()} - files.keys()
            files |= {name: record_file(aside / name) for name in others}
            content = {
                "kind": KIND,
                "source": str(self.hf_dir.resolve()),
                "spec": {"name": self.spec.name, **self.spec.model_dump(mode="json")},
                "dtype": self.dtype,
                SETTINGS: self._format.settings,
                **lineage,
                "files": {name: record.model_dump() for name, record in sorted(files.items())},
                "environment": environment(),
            }
            write_sealed(aside / LINEAGE_JSON, content)


class SavedWeights:
    """The weights of a saved checkpoint by the HF names of the model that was quantized.

    A packed linear is unpacked in fp32 and rounded to `dtype` once; one is held at a time.

    Attributes:
        tensors: shapes and types of the dense weights, in the order of the files.
    """

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        config = read_object(directory / "config.json")
        self._format = read_format(config[SETTINGS])
        self._dtype, self._files = dtype, HFWeights(directory)
        stored = self._files.tensors

        # tensors of each packed linear, by their last names
        self._parts: dict[str, dict[str, str]] = {
            name.rpartition(".")[0]: {}
            for name in stored
            if name.endswith(f".{self._format.scales}")
        }
        tensors: dict[str, Described] = {}
        for name, described in stored.items():
            linear, _, last = name.rpartition(".")
            if linear in self._parts and last != "bias":
                self._parts[linear][last] = name
                tensors[f"{linear}.weight"] = described  # keeps the place; described below
            elif self._format.is_weight(name):
                tensors[name] = described
        for linear, parts in self._parts.items():
            shape = self._format.weight_shape({last: stored[name] for last, name in parts.items()})
            tensors[f"{linear}.weight"] = Described(shape, dtype)
        self.tensors: Mapping[str, Described] = tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a dense weight, contiguous."""
        linear, _, last = name.rpartition(".")
        if linear not in self._parts or last == "bias":
            return self._files.read(name, start, stop)
        parts = {
            key: read_whole(self._files, tensor) for key, tensor in self._parts[linear].items()
        }
        # As a whole first: a transform of outputs mixes rows.
        return self._format.dense(linear, parts)[start:stop].to(self._dtype)

    def restore(self, block: Block) -> None:
        """Let a block with these weights cast activations and cache as the checkpoint says."""
        self._format.restore(block, self._files)
