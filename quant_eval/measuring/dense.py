"""The dequantized weights that were measured, as files beside a result (`--dense`).

dense/block00000.safetensors, one for each decoder block, holds the tensors that quantization
changed, under the names that the base model's files have; dense/dense.json, whose hash is in
result.json, vouches for them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from base.errors import UserError
from base.files import FileRecord, committed_directory, sha256_of, write_json
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import Shard, write_shard
from ckpt_tools.formats.weights import DTYPES, Described, read_whole
from ckpt_tools.hf.directory import DENSE_JSON
from ckpt_tools.hf.forward import empty_model, names_in_files, read_config
from quant_eval.model.streamed import Block
from quant_eval.specs import QuantSpec


def check_dense(specs: Sequence[QuantSpec], draws: int) -> None:
    """Refuse a spec of which what is measured is not one set of weights."""
    for spec in specs:
        if spec.method == "int8":
            raise UserError(
                f"{spec.name} rounds activations too, no weights alone reproduce it; leave"
                " --dense out"
            )
        if draws > 1:
            raise UserError(
                "--dense keeps the weights of one calibration draw; leave --calibration-seeds out"
            )


class _Held(NamedTuple):
    """Weights in memory."""

    held: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Described]:
        return {
            name: Described(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.held[name][start:stop]


class DenseWriter:
    """Writes one block after another into an empty directory, dense.json last.

    Attributes:
        sha256: of dense.json, once it is written.
    """

    def __init__(self, hf_dir: Path, directory: Path, spec: QuantSpec, dtype: str) -> None:
        """`dtype`, of `DTYPES`, is what the model is measured and its weights are written in."""
        self._directory, self._spec, self._dtype = directory, spec, dtype
        self._base, self._names = (
            HFWeights(hf_dir),
            names_in_files(empty_model(read_config(hf_dir))),
        )
        self._files: dict[str, FileRecord] = {}
        self.sha256 = ""

    def add(self, index: int, block: Block) -> None:
        """Write what differs in any bit from the base in the same type; every block once."""
        changed: dict[str, Tensor] = {}
        for key, made in block.module.state_dict().items():
            name = self._names[f"{block.prefix}.{key}"]
            held = read_whole(self._base, name).to(DTYPES[self._dtype])
            made = made.cpu().contiguous().view(held.shape)
            if not torch.equal(made.view(-1).view(torch.uint8), held.view(-1).view(torch.uint8)):
                changed[name] = made
        weights, file = _Held(changed), f"block{index:05d}.safetensors"
        self._files[file] = write_shard(self._directory, Shard(file, weights.tensors), weights)

    def finish(self, weights_sha256: dict[str, str]) -> None:
        """Write dense.json, given the hashes of the base's files."""
        content = {
            "spec": self._spec.name,
            "base": {"weights_sha256": weights_sha256},
            "dtype": self._dtype,
            "files": {name: record.model_dump() for name, record in self._files.items()},
        }
        write_json(self._directory / Path(DENSE_JSON).name, content)
        self.sha256 = sha256_of(self._directory / Path(DENSE_JSON).name)


@contextmanager
def dense_writers(
    hf_dir: Path,
    specs: Sequence[QuantSpec],
    outs: Sequence[Path],
    dtype: str,
    weights_sha256: dict[str, str],
) -> Iterator[list[DenseWriter]]:
    """Yield a writer for each spec, of the directory `dense` below its `out`.

    The directories take their place when the block ends well; otherwise what was there stays.
    """
    with ExitStack() as directories:
        writers = []
        for spec, out in zip(specs, outs, strict=True):
            aside = directories.enter_context(committed_directory((out / DENSE_JSON).parent))
            writers.append(DenseWriter(hf_dir, aside, spec, dtype))
        yield writers
        for writer in writers:
            writer.finish(weights_sha256)
