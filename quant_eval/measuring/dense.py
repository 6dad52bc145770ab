"""The dequantized weights that were measured, as files beside a result (`--dense`).

dense/block00000.safetensors, one for each decoder block, holds the tensors that quantization
changed, under the names that the base model's files have; dense/dense.json, whose hash is in
result.json, vouches for them.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from base.files import FileRecord, record_file, sha256_of, write_json
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES, read_whole
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.directory import DENSE_JSON
from ckpt_tools.hf.forward import empty_model, names_in_files
from quant_eval.model.streamed import Block
from quant_eval.quantizer import QuantSpec


class DenseWriter:
    """Writes one block after another into an empty directory, dense.json last."""

    def __init__(self, hf_dir: Path, directory: Path, spec: QuantSpec, dtype: str) -> None:
        """`dtype`, of `DTYPES`, is what the model is measured and its weights are written in."""
        self._directory, self._spec, self._dtype = directory, spec, dtype
        self._base = HFWeights(hf_dir)
        self._names = names_in_files(empty_model(read_config(hf_dir)))
        self._files: dict[str, FileRecord] = {}

    def add(self, index: int, block: Block) -> None:
        """Write the tensors that differ in any bit from the base in this dtype, once per block."""
        changed: dict[str, Tensor] = {}
        for key, tensor in block.module.state_dict().items():
            name = self._names[f"{block.prefix}.{key}"]
            base = read_whole(self._base, name).to(DTYPES[self._dtype])
            tensor = tensor.cpu().contiguous().view(base.shape)
            # By bytes: 0 and -0 are equal values with different bits.
            if not torch.equal(tensor.view(-1).view(torch.uint8), base.view(-1).view(torch.uint8)):
                changed[name] = tensor
        file = f"block{index:05d}.safetensors"
        save_file(changed, self._directory / file, metadata={"format": "pt"})
        self._files[file] = record_file(self._directory / file)

    def finish(self, weights_digests: dict[str, str]) -> str:
        """Write dense.json, with the hashes of the base's files, and return its own hash."""
        content = {
            "spec": self._spec.name,
            "base": {"weights_digests": weights_digests},
            "dtype": self._dtype,
            "files": {name: record.model_dump() for name, record in self._files.items()},
        }
        path = self._directory / Path(DENSE_JSON).name
        write_json(path, content)
        return sha256_of(path)
