"""The content of a probe, by a plain forward pass of transformers, and whom a refusal accuses."""

import re
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def plain_probe(model: Any, input_ids_BS: Tensor) -> dict[str, Tensor]:
    """Logits and the outputs of all layers and of all modules without children that have
    parameters, in fp32.
    """
    probe: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            whole = name.endswith(("embed_tokens", "embed_in"))
            probe[f"outputs/{name}"] = (output if whole else output[:, -1]).float().contiguous()

        return hook

    handles = [
        module.register_forward_hook(keep(name))
        for name, module in model.named_modules()
        if name != "lm_head"
        and (
            re.fullmatch(r".*layers\.\d+", name)
            or (not list(module.children()) and list(module.parameters()))
        )
    ]
    probe["logits"] = model(input_ids=input_ids_BS, use_cache=False).logits.float()
    for handle in handles:
        handle.remove()
    return probe


def largest_error(outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all outputs, the largest |difference| over the largest |value| of the same output."""
    assert outputs.keys() == expected.keys()
    assert all(outputs[key].shape == expected[key].shape for key in expected)
    return max(
        ((outputs[key] - expected[key]).abs().max() / expected[key].abs().max()).item()
        for key in expected
    )


def name_of(layer: int, module: str) -> str:
    """HF's name of a weight."""
    return f"model.layers.{layer}.{module}.weight"


def accused(line: str) -> set[str]:
    """The parameters that a refusal names."""
    match = re.search(r"not what was trained: (.*?)(?: \(or heads[^)]*\))?; from", line)
    assert match, line
    return set(match[1].split(", "))
