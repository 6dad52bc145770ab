"""The step from full-precision to quantized weights, read from what `quant_eval run --dense` left."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from torch import Tensor, promote_types

from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.weights import FileTensor
from ckpt_tools.hf_directory import DENSE_JSON, RESULT_JSON
from ckpt_tools.hf_model import identify
from train.command import UserError, explain_validation
from train.frozen import Frozen
from train.run_directory import FileRecord, check_inside, sha256_of, verify_files

Kind = TypeVar("Kind", bound=BaseModel)


class _Base(Frozen):
    weights_sha256: dict[str, str]


class _Dense(Frozen):
    """dense.json."""

    spec: str
    base: _Base
    dtype: Literal["fp32", "bf16"]
    files: dict[str, FileRecord]


class _Intervals(BaseModel):
    absolute_error: tuple[float, float]


class _Increase(BaseModel):
    absolute_error: float
    intervals: _Intervals

    def described(self) -> dict[str, Any]:
        return {"absolute_error": self.absolute_error, "interval": list(self.intervals.absolute_error)}


class _Block(BaseModel):
    block: int
    alone: _Increase


class _Measured(_Increase):
    cross_entropy: float
    cross_entropy_quantized: float
    blocks: list[_Block] = []
    dense: str | None = None


class _Result(BaseModel):
    """What is of use of result.json."""

    measured: _Measured


class Step(NamedTuple):
    """delta = quantized - base, of which tensors are read one at a time.

    Attributes:
        spec: its name.
        names: the tensors that differ, as the base's files call them, block after block.
        measured: what quantization cost on the text of result.json, nats per token: "cross_entropy",
            "cross_entropy_quantized", "absolute_error" with its "interval", and, where they were measured, "blocks":
            "absolute_error" and "interval" of each block quantized alone.
        base, quantized: where the tensors of either lie, by name; `quantized` holds those that differ.
    """

    spec: str
    names: tuple[str, ...]
    measured: dict[str, Any]
    base: dict[str, FileTensor]
    quantized: dict[str, FileTensor]

    def delta(self, name: str) -> Tensor | None:
        """Quantized minus base in fp32, in the base's shape; None for a tensor that does not differ."""
        if name not in self.quantized:
            return None
        base, quantized = self.base[name], self.quantized[name]
        return quantized.read(0, quantized.shape[0]).float() - base.read(0, base.shape[0]).float()


def read_step(hf_dir: Path, result_dir: Path) -> Step:
    """Opens a result whose dequantized weights were kept, and checks every file of it and of the base.

    Args:
        hf_dir: the model that was quantized.
        result_dir: of the result, such as HF_DIR/quant/SPEC.

    Raises:
        UserError: there are no dequantized weights, a file is damaged, or another model was quantized.
    """
    again = f"measure it with 'python -m quant_eval run {hf_dir} --dense' and this spec"
    measured = _read(_Result, result_dir / RESULT_JSON, again).measured
    path = result_dir / DENSE_JSON
    if measured.dense is None or not path.is_file():
        raise UserError(f"{result_dir} holds no dequantized weights; {again}")
    if sha256_of(path) != measured.dense:
        raise UserError(f"{path} is not the one that {RESULT_JSON} was written with; {again}")
    dense = _read(_Dense, path, again)
    check_inside(path, dense.files)
    verify_files(path.parent, dense.files, again)
    if identify(hf_dir)["weights_sha256"] != dense.base.weights_sha256:
        raise UserError(f"{result_dir} is of another model than {hf_dir}; give the one that was quantized")
    base = HFWeights(hf_dir).stored
    quantized = {name: held for file in dense.files for name, held in read_header(path.parent / file).items()}
    for name, held in quantized.items():
        if name not in base or base[name].shape != held.shape:
            raise UserError(f"{path}: '{name}' does not fit {hf_dir}; {again}")
        if promote_types(base[name].dtype, held.dtype) != held.dtype:
            raise UserError(
                f"{result_dir} was measured in {dense.dtype}, {hf_dir} holds more digits, which the step would count "
                f"as quantization; measure it with --dtype fp32"
            )
    if not quantized:
        raise UserError(f"{result_dir} quantized nothing: its weights are those of {hf_dir}; choose fewer bits")
    of_use = measured.model_dump(include={"cross_entropy", "cross_entropy_quantized"}) | measured.described()
    if measured.blocks:
        of_use["blocks"] = [{"block": one.block} | one.alone.described() for one in measured.blocks]
    return Step(dense.spec, tuple(quantized), of_use, base, quantized)


def _read(kind: type[Kind], path: Path, next_action: str) -> Kind:
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {next_action}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; {next_action}") from None
    except ValidationError as error:
        raise explain_validation(str(path), error) from None
