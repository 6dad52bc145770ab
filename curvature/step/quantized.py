"""The step from full-precision to quantized weights, from a result of `quant_eval run --dense`."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, promote_types

from base.errors import UserError
from base.files import FileRecord, check_inside, sha256_of, verify_files
from base.frozen import Frozen
from base.reading import read_model
from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.weights import FileTensor
from ckpt_tools.hf.directory import DENSE_JSON, RESULT_JSON
from ckpt_tools.hf.measured import Increase, Quantization
from ckpt_tools.hf.model import identify
from ckpt_tools.hf.results import read_result


class _Base(Frozen):
    weights_digests: dict[str, str]


class _Dense(Frozen):
    """dense.json."""

    spec: str
    base: _Base
    dtype: Literal["fp32", "bf16"]
    files: dict[str, FileRecord]


class QuantizationStep(NamedTuple):
    """delta = quantized - base, of which tensors are read one at a time.

    Attributes:
        spec: its name.
        measured: the cost of quantization on the text of result.json, nats per token; where it was
            measured, also that of each block quantized alone.
        base, quantized: the tensors of either in their files, by name; `quantized` holds those
            that differ in any bit, block after block.
    """

    spec: str
    measured: dict[str, Any]
    base: dict[str, FileTensor]
    quantized: dict[str, FileTensor]

    def delta(self, name: str) -> Tensor | None:
        """Return quantized minus base in fp32, in the base's shape, None if they are equal."""
        if name not in self.quantized:
            return None
        base, quantized = self.base[name], self.quantized[name]
        delta = quantized.read(0, quantized.shape[0]).float() - base.read(0, base.shape[0]).float()
        # Bits may differ where values do not: 0 and -0.
        return delta if delta.any() else None


def read_step(hf_dir: Path, result_dir: Path) -> QuantizationStep:
    """Open a result with dequantized weights, and check every file of it and of the base.

    Raises:
        UserError: there are no dequantized weights, a file is damaged, or another model was
            quantized.
    """
    # the files are those of the result, and of this model
    again = f"measure it with 'python -m quant_eval run {hf_dir} --dense' and this spec"
    measured = read_result(result_dir / RESULT_JSON, Quantization).measured
    path = result_dir / DENSE_JSON
    if measured.dense is None or not path.is_file():
        raise UserError(f"{result_dir} holds no dequantized weights; {again}")
    # A chain of hashes: result.json has that of dense.json, which has those of all its files.
    if sha256_of(path) != measured.dense:
        raise UserError(f"{path} is not the one that {RESULT_JSON} was written with; {again}")
    dense = read_model(_Dense, path)
    check_inside(path, dense.files)
    verify_files(path.parent, dense.files, again)
    if identify(hf_dir)["weights_digests"] != dense.base.weights_digests:
        raise UserError(
            f"{result_dir} is of another model than {hf_dir}; give the one that was quantized"
        )

    # their tensors fit the model's, and hold its digits
    base = HFWeights(hf_dir).tensors
    quantized = {
        name: tensor
        for file in dense.files
        for name, tensor in read_header(path.parent / file).items()
    }
    for name, tensor in quantized.items():
        if name not in base or base[name].shape != tensor.shape:
            raise UserError(f"{path}: '{name}' does not fit {hf_dir}; {again}")
        if promote_types(base[name].dtype, tensor.dtype) != tensor.dtype:
            raise UserError(
                f"{result_dir} was measured in {dense.dtype}, {hf_dir} holds more digits, which the"
                " step would count as quantization; measure it with --dtype fp32"
            )

    cost = {
        "cross_entropy": measured.cross_entropy,
        "cross_entropy_quantized": measured.cross_entropy_quantized,
        **_increase(measured),
    }
    if measured.blocks:
        cost["blocks"] = [
            {"block": each.block, **_increase(each.alone)} for each in measured.blocks
        ]
    step = QuantizationStep(dense.spec, cost, base, quantized)
    # Reads no further than to the first tensor that differs.
    if all(step.delta(name) is None for name in quantized):
        raise UserError(
            f"{result_dir} quantized nothing: its weights are those of {hf_dir}; choose fewer bits"
        )
    return step


def _increase(measured: Quantization | Increase) -> dict[str, Any]:
    interval = measured.intervals.get("absolute_error")
    return {
        "absolute_error": measured.absolute_error,
        "interval": list(interval) if interval else None,
    }
