"""The layout of a GPTQ checkpoint, as config.json tells it and loaders take it.

gptqmodel 7.6 loads all that is written here. Symmetric checkpoints are written as "gptq" (version
1), which every loader reads. Asymmetric ones are written as "gptq_v2": a zero may be 0, version 1
stores zeros less one, and loaders differ in what they make of the -1 (gptqmodel refuses asymmetric
version 1 of others). vLLM reads 4 and 8 symmetric bits in groups of 32, 64, 128 or a whole row; 2
and 3 bits, and "gptq_v2", some versions only.

Shapes: O output features, I input features, G groups of a row.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from base.errors import UserError, explain_validation
from base.frozen import Frozen
from ckpt_tools.formats.weights import Described
from quant_eval.gptq_format.packing import WORD_BITS, Format
from quant_eval.specs import QuantSpec

PACKED = ("qweight", "qzeros", "scales", "g_idx")  # in place of "weight"
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # that gptqmodel takes, besides a whole row
WHOLE_ROW = -1
SETTINGS = "quantization_config"  # key of config.json


class Layout(Frozen):
    """The layout of the packed tensors of a checkpoint."""

    quant_method: Literal["gptq"] = "gptq"
    bits: Literal[2, 3, 4, 8]
    group_size: int = Field(ge=-1, description="inputs that share a scale; -1: a whole row does")
    desc_act: bool = Field(
        description="whether groups are other than neighbouring inputs, so that kernels need g_idx"
    )
    sym: bool
    checkpoint_format: Format
    pack_dtype: Literal["int32"] = "int32"

    def groups(self, num_inputs: int) -> int:
        """G of a linear."""
        return 1 if self.group_size == WHOLE_ROW else num_inputs // self.group_size

    def natural_groups(self, num_inputs: int) -> Tensor:
        """g_idx of neighbouring inputs, int32 [I]."""
        size = num_inputs // self.groups(num_inputs)
        return torch.arange(num_inputs, dtype=torch.int32) // size

    def packed(self, num_outputs: int, num_inputs: int) -> dict[str, Described]:
        """Shapes and types of the four tensors of a linear."""
        groups = self.groups(num_inputs)
        return {
            "qweight": Described((num_inputs * self.bits // WORD_BITS, num_outputs), torch.int32),
            "qzeros": Described((groups, num_outputs * self.bits // WORD_BITS), torch.int32),
            "scales": Described((groups, num_outputs), torch.float16),
            "g_idx": Described((num_inputs,), torch.int32),
        }

    def settings(self) -> dict[str, Any]:
        """Return `quantization_config` of config.json, with the keys that all loaders need."""
        return {**self.model_dump(), "format": self.checkpoint_format, "lm_head": False}


def layout_of(spec: QuantSpec) -> Layout:
    """Return the layout of a saved result; `desc_act` is set by the writer, which sees the groups.

    Raises:
        UserError: the saved weights would not be the measured ones, or no loader takes them.
    """
    if spec.scales is None:
        raise UserError(
            f"spec {spec.name} cannot be saved as a GPTQ checkpoint; give one of rtn or gptq"
        )
    if spec.bits not in (2, 3, 4, 8):
        raise UserError(
            f"spec {spec.name}: GPTQ checkpoints hold 2, 3, 4 or 8 bits, not {spec.bits}; change -b"
        )
    if spec.group_size not in (None, *GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise UserError(
            f"spec {spec.name}: gptqmodel loads groups of {sizes}; change -g, or give perchannel"
        )
    if spec.scales != "fp16":
        fitting = spec.model_copy(update={"scales": "fp16"}).name
        raise UserError(
            f"spec {spec.name}: GPTQ checkpoints hold scales in fp16; give {fitting}, and measure"
            " that"
        )
    return Layout(
        bits=spec.bits,  # type: ignore[arg-type]  # checked above
        group_size=spec.group_size or WHOLE_ROW,
        desc_act=False,
        sym=bool(spec.symmetric),
        checkpoint_format="gptq" if spec.symmetric else "gptq_v2",
    )


def check_linear(name: str, num_outputs: int, num_inputs: int, spec: QuantSpec) -> None:
    """Refuse a linear that cannot be packed with the bits and groups of a spec."""
    multiple = next(count for count in (4, 8, 16, 32) if count * spec.bits % WORD_BITS == 0)
    if num_outputs % multiple:
        raise UserError(
            f"{name} has {num_outputs} outputs; loaders need a multiple of {multiple} to unpack"
            f" zeros of {spec.bits} bits, so spec {spec.name} cannot be saved; measure it without"
            " saving"
        )
    if num_inputs % WORD_BITS:
        raise UserError(
            f"{name} has {num_inputs} inputs; loaders need a multiple of 32 to unpack codes, so"
            f" spec {spec.name} cannot be saved; measure it without saving"
        )
    if spec.group_size and num_inputs % spec.group_size:
        raise UserError(
            f"{name} has {num_inputs} inputs, no multiple of {spec.group_size}; change -g of"
            f" {spec.name}"
        )


def read_layout(directory: Path) -> tuple[Layout, torch.dtype]:
    """The layout of a saved checkpoint, and the type of its weights.

    Raises:
        UserError: config.json is damaged, or it is that of another format.
    """
    path = directory / "config.json"
    try:
        config = dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; give a directory saved in the GPTQ format"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); save the checkpoint again") from None
    held = config.get(SETTINGS)
    if not isinstance(held, dict):
        raise UserError(f"{path} has no {SETTINGS}; give a directory saved in the GPTQ format")
    try:
        layout = Layout.model_validate(
            {key: held[key] for key in Layout.model_fields if key in held}, strict=True
        )
    except ValidationError as error:
        raise explain_validation(f"{path}: {SETTINGS}", error) from None
    if held.get("dynamic"):
        raise UserError(
            f"{path}: {SETTINGS} differ by layer ('dynamic'), which is not supported; save it"
            " without"
        )
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    name = config.get("dtype", config.get("torch_dtype"))
    if name not in dtypes:
        raise UserError(f"{path}: dtype {name!r} is none of {', '.join(dtypes)}; correct it")
    return layout, dtypes[name]
