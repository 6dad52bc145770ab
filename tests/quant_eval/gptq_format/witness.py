"""gptqmodel on its own, in one process for all: what it loads from checkpoints, and what its packer makes of codes.

`python -m tests.quant_eval.gptq_format.witness ROOT`: for each checkpoint of ROOT a file NAME.safetensors with the
logits and the dense weights; for each `unpacked-BITS.safetensors` a file `packed-BITS.safetensors`.

Shapes: O output features, I input features, G groups of a row.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quant_eval.gptq_format.run_reload import load
from quant_eval.libraries import pcre
from tests.quant_eval.gptq_format.examples import input_ids


@torch.no_grad()
def main(root: Path) -> None:
    """Loads and packs all there is."""
    pcre.stand_in()

    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for checkpoint in sorted(path.parent for path in root.glob("*/lineage.json")):
        model = load(checkpoint, torch.float32)
        found = {"logits": model(input_ids=input_ids(), use_cache=False).logits}
        for name, module in model.model.named_modules():
            if isinstance(module, TorchLinear):
                found[f"{name}.weight"] = module.dequantize_weight().T.contiguous()
        save_file(found, root / f"{checkpoint.name}.safetensors")
    for path in sorted(root.glob("unpacked-*.safetensors")):
        bits = int(path.stem.removeprefix("unpacked-"))
        given = load_file(path)
        num_outputs, num_inputs = given["dense_OI"].shape
        linear = nn.Linear(num_inputs, num_outputs, bias=False)
        linear.weight.data = given["dense_OI"]
        group_size = num_inputs // given["scales_OG"].shape[1]
        packer = TorchLinear(bits, group_size, True, True, num_inputs, num_outputs, register_buffers=True)
        packer.pack(linear, given["scales_OG"], given["zeros_OG"].float(), given["groups_I"])
        made = {key: getattr(packer, key).clone() for key in ("qweight", "qzeros", "scales", "g_idx")}
        packer.qzero_format(format=2)
        convert_gptq_v2_to_v1_format_module(packer, QuantizeConfig(bits=bits))
        save_file({**made, "qzeros_v1": packer.qzeros}, root / f"packed-{bits}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
