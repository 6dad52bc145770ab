"""The outputs of the modules of a transformers model in one forward pass, by their names there.

Shapes: B sequences, S tokens, H hidden size, W width of a module's output.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train.run.directory import PROBE_OUTPUTS


@contextmanager
def recorded(model: Any) -> Iterator[dict[str, Tensor]]:
    """Record the module outputs of `Engine.probe` in forward passes within the block."""
    outputs: dict[str, Tensor] = {}
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = set(model.base_model.layers)

    def keep(name: str, every_token: bool) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output_BSW: Tensor) -> None:
            kept = output_BSW if every_token else output_BSW[:, -1]
            outputs[PROBE_OUTPUTS + name] = kept.detach().to("cpu", torch.float32, copy=True)

        return hook

    handles = [
        module.register_forward_hook(keep(name, every_token=module is embedding))
        for name, module in model.named_modules()
        if module in layers
        or (module is not lm_head and next(module.parameters(recurse=False), None) is not None)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
