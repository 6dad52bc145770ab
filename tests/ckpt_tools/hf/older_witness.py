"""A process of its own: logits and token ids by another version of transformers.

Usage: older_witness.py PACKAGES ROOT TEXT. PACKAGES holds that version; of each HF directory below ROOT
the answers go into DIRECTORY/older.safetensors.
"""

import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(directory: Path, text: str) -> None:
    """Write the answers of one directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    input_ids_BS = torch.arange(60)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        answers = {"input_ids": input_ids_BS, "logits": model(input_ids_BS).logits}
    if (directory / "tokenizer.json").exists():
        tokens = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
        answers["tokens"] = torch.tensor(tokens)
    save_file(answers, directory / "older.safetensors")


if __name__ == "__main__":
    assert Path(transformers.__file__).is_relative_to(sys.argv[1]), transformers.__file__
    for directory in sorted(Path(sys.argv[2]).iterdir()):
        answer(directory, sys.argv[3])
    print(transformers.__version__)
