"""The two formats of quantized checkpoints, as the writer and the reader use them.

Shapes: O output features, I input features.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from base.rounding.grid import Rounded
from ckpt_tools.formats.weights import Described, Weights
from quant_eval.model.streamed import Block
from quant_eval.saved.compressed import CompressedFormat
from quant_eval.saved.gptq import GPTQFormat, GPTQSettings, settings_of
from quant_eval.specs import QuantSpec
from quant_eval.transforms.steps import Transform

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PretrainedConfig

SETTINGS = "quantization_config"  # key of config.json


class SavedFormat(Protocol):
    """One checkpoint's format.

    Attributes:
        scales: last name of the tensor that only packed linears have.
    """

    scales: str

    @property
    def settings(self) -> dict[str, Any]:
        """The value of `quantization_config`, once all linears are packed."""
        ...

    def check_linears(self, linears: Mapping[str, nn.Linear]) -> None:
        """Refuse linears that cannot be packed."""
        ...

    def pack(self, linear: str, rounded: Rounded, inputs: Transform | None) -> dict[str, Tensor]:
        """Return the tensors of a linear, whose inputs are transformed, by name."""
        ...

    def block_tensors(self, block: Block) -> dict[str, Tensor]:
        """Return what else a quantized block holds, by name."""
        ...

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor of another module than packed linears is one of the model's."""
        ...

    def weight_shape(self, parts: Mapping[str, Described]) -> tuple[int, int]:
        """Return the shape [O, I] of the weight that tensors of a linear hold."""
        ...

    def dense(self, linear: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that a block computes with, fp32 [O, I]."""
        ...

    def restore(self, block: Block, tensors: Weights) -> None:
        """Let a block that holds those weights cast what was cast in the measurement."""
        ...


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
