"""The process that `reload.reload_with_gptqmodel` starts: gptqmodel's own reading of a saved checkpoint.

Shapes: N blocks, B blocks of a batch, L tokens of a block, V vocabulary.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its loader asks for two, however many cores there are
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would compile C++ at the first forward

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES, read_whole
from ckpt_tools.forward import names_in_files
from quant_eval.gptq_format.reload import Job
from quant_eval.libraries import pcre
from train.run_directory import write_json
from train.tokenizer import TOKENIZER_JSON


def with_tokenizer(checkpoint: Path, place: Path) -> Path:
    """The checkpoint, or links to its files beside a tokenizer: gptqmodel loads no model without one, and uses none."""
    if (checkpoint / TOKENIZER_JSON).exists():
        return checkpoint
    for path in checkpoint.iterdir():
        (place / path.name).symlink_to(path)
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(place / TOKENIZER_JSON))  # noqa: S106  no password
    write_json(place / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return place


@torch.no_grad()
def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The model of a checkpoint as gptqmodel loads it, on the CPU, with its kernel of plain torch operations."""
    weights = HFWeights(checkpoint)
    pcre.stand_in()

    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    # Its torch operations are right in fp32 as well, where the loss is compared to four digits and more.
    TorchLinear.SUPPORTS_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
    model = GPTQModel.load(
        str(checkpoint), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=dtype, trust_remote_code=False
    )
    for name, name_in_files in names_in_files(model.model).items():
        if name != name_in_files:  # it leaves such a parameter uninitialized, the head of GPT-NeoX, and says nothing
            model.model.get_parameter(name).copy_(read_whole(weights, name_in_files))
    return model


@torch.no_grad()
def losses(model: Any, input_ids_NL: Tensor, batch_size: int) -> Tensor:
    """The sum over each block's targets of -log p in fp32, float64 [N]."""
    sums = []
    for batch_BL in input_ids_NL.split(batch_size):
        logits_BLV = model(input_ids=batch_BL, use_cache=False).logits[:, :-1].float()
        chosen_BL = torch.log_softmax(logits_BLV, dim=-1).gather(2, batch_BL[:, 1:, None])[..., 0]
        sums.append(-chosen_BL.double().sum(1))
    return torch.cat(sums)


if __name__ == "__main__":
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as links:
        quantized = load(with_tokenizer(job.checkpoint, Path(links)), DTYPES[job.dtype])
        found = losses(quantized, load_file(job.blocks)["input_ids"], job.batch_size)
    save_file({"nll": found}, job.out)
