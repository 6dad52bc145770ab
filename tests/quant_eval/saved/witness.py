"""transformers and gptqmodel on their own, in one process for all: what they load from checkpoints.

`python -m tests.quant_eval.saved.witness ROOT`: for some checkpoints of ROOT a file
transformers-NAME.safetensors with the logits; for each a file NAME.safetensors with gptqmodel's
logits and dense weights.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its loader asks for two
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would compile C++ at the first forward

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.forward import names_in_files
from quant_eval.libraries import pcre
from tests.quant_eval.saved.examples import BY_TRANSFORMERS, input_ids


@torch.no_grad()
def transformers_logits(checkpoint: Path) -> torch.Tensor:
    """Logits as transformers loads the checkpoint, through optimum and gptqmodel, in bf16: fp32 is
    refused by the kernels.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map="cpu"
    )
    logits: torch.Tensor = model(input_ids=input_ids(), use_cache=False).logits
    return logits.float().contiguous()


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
        # it leaves such a parameter uninitialized, the head of GPT-NeoX, and says nothing
        if name != name_in_files:
            model.model.get_parameter(name).copy_(read_whole(weights, name_in_files))
    return model


@torch.no_grad()
def main(root: Path) -> None:
    """Loads all there is; transformers first, before `load` changes gptqmodel."""
    pcre.stand_in()
    for name in BY_TRANSFORMERS:
        logits = transformers_logits(root / name)
        save_file({"logits": logits}, root / f"transformers-{name}.safetensors")

    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    for checkpoint in sorted(path.parent for path in root.glob("*/lineage.json")):
        model = load(checkpoint, torch.float32)
        outputs = {"logits": model(input_ids=input_ids(), use_cache=False).logits}
        for name, module in model.model.named_modules():
            if isinstance(module, TorchLinear):
                outputs[f"{name}.weight"] = module.dequantize_weight().T.contiguous()
        save_file(outputs, root / f"{checkpoint.name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
