"""gptqmodel on its own, in one process for all: what it loads from checkpoints, and what its
packer makes of codes.

`python -m tests.quant_eval.saved.witness ROOT`: for each checkpoint of ROOT a file
NAME.safetensors with the logits and the dense weights; for each `unpacked-BITS.safetensors` a file
`packed-BITS.safetensors`.

Shapes: O output features, I input features, G groups of a row.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its loader asks for two
# It would compile C++ at the first forward, and to pack, where its Python does the same.
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "GPTQMODEL_DISABLE_PACK_EXT": "1"}

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.forward import names_in_files
from quant_eval.libraries import pcre
from tests.quant_eval.saved.examples import input_ids


@torch.no_grad()
def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The model of a checkpoint as gptqmodel loads it, on the CPU, with its kernel of plain
    torch operations.
    """
    weights = HFWeights(checkpoint)
    pcre.stand_in()

    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    # Its torch operations are right in fp32 as well, where the loss is compared to four digits and
    # more.
    TorchLinear.SUPPORTS_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
    model = GPTQModel.load(
        str(checkpoint),
        device="cpu",
        backend=BACKEND.GPTQ_TORCH,
        dtype=dtype,
        trust_remote_code=False,
    )
    for name, name_in_files in names_in_files(model.model).items():
        if (
            name != name_in_files
        ):  # it leaves such a parameter uninitialized, the head of GPT-NeoX, and says nothing
            model.model.get_parameter(name).copy_(read_whole(weights, name_in_files))
    return model


@torch.no_grad()
def main(root: Path) -> None:
    """Loads and packs all there is."""
    pcre.stand_in()

    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for checkpoint in sorted(path.parent for path in root.glob("*/lineage.json")):
        model = load(checkpoint, torch.float32)
        outputs = {"logits": model(input_ids=input_ids(), use_cache=False).logits}
        for name, module in model.model.named_modules():
            if isinstance(module, TorchLinear):
                outputs[f"{name}.weight"] = module.dequantize_weight().T.contiguous()
        save_file(outputs, root / f"{checkpoint.name}.safetensors")
    for path in sorted(root.glob("unpacked-*.safetensors")):
        bits = int(path.stem.removeprefix("unpacked-"))
        given = load_file(path)
        num_outputs, num_inputs = given["dense_OI"].shape
        linear = nn.Linear(num_inputs, num_outputs, bias=False)
        linear.weight.data = given["dense_OI"]
        group_size = num_inputs // given["scales_OG"].shape[1]
        packer = TorchLinear(
            bits, group_size, True, True, num_inputs, num_outputs, register_buffers=True
        )
        packer.pack(linear, given["scales_OG"], given["zeros_OG"].float(), given["groups_I"])
        tensors = {
            key: getattr(packer, key).clone() for key in ("qweight", "qzeros", "scales", "g_idx")
        }
        packer.qzero_format(format=2)
        convert_gptq_v2_to_v1_format_module(packer, QuantizeConfig(bits=bits))
        save_file({**tensors, "qzeros_v1": packer.qzeros}, root / f"packed-{bits}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
