"""Outlier statistics of matrices and of what a model's linears read, by scipy, numpy and hooks.

Shapes: B sequences, S tokens, N rows, I channels.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kurtosis


def plain_statistics(x_NI: NDArray[np.float64]) -> dict[str, float]:
    """Every statistic of all rows at once."""
    sizes_NI, squares_I = np.abs(x_NI), np.sort((x_NI**2).sum(0))[::-1]
    # Of an even number of entries it is the lower of the two in the middle.
    medians_N = np.quantile(sizes_NI, 0.5, axis=1, method="lower")
    top = -(-len(squares_I) // 100)
    return {
        "kurtosis": kurtosis(x_NI, axis=None, fisher=False),
        "max_to_mean": (sizes_NI.max(1) / sizes_NI.mean(1)).mean(),
        "max_to_median": (sizes_NI.max(1) / medians_N).mean(),
        "top_channels": squares_I[:top].sum() / squares_I.sum(),
    }


def plain_figures(
    input_NI: NDArray[np.float64], weight_OI: NDArray[np.float64]
) -> dict[str, float]:
    """The figures of a linear."""
    kinds = {"input": plain_statistics(input_NI), "weight": plain_statistics(weight_OI)}
    return {f"{kind}_{key}": value for kind, row in kinds.items() for key, value in row.items()}


def linears_of(model: Any) -> dict[str, torch.nn.Linear]:
    """All linears of the layers by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if ".layers." in name and isinstance(module, torch.nn.Linear)
    }


@torch.no_grad()
def plain_inputs(model: Any, tokens_BS: torch.Tensor) -> dict[str, NDArray[np.float64]]:
    """The inputs of every linear in a forward pass, [B S, I]."""
    inputs: dict[str, NDArray[np.float64]] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, x: Any, __: Any) -> None:
            inputs[name] = x[0].flatten(0, -2).double().numpy()

        return hook

    hooks = [
        module.register_forward_hook(watch(name)) for name, module in linears_of(model).items()
    ]
    model(tokens_BS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs


def plain_weight(module: torch.nn.Linear) -> NDArray[np.float64]:
    """The weight of a linear, [O, I]."""
    weight: NDArray[np.float64] = module.weight.detach().double().numpy()
    return weight
