"""The plane of a trajectory on a GPU against the CPU's."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from base.ranks import Ranks
from curvature.settings import SliceSettings
from curvature.slices.principal import measure
from tests.gpu.figures import CheckedFigure
from tests.gpu.workbench import Workbench, hf_model, token_file

CHECKPOINTS, SEQUENCES = 4, 3


def trajectory(workbench: Workbench) -> list[Path]:
    """Return random checkpoints, each some steps from the one before."""
    sizes, paths = workbench.sizes, list[Path]()
    generator = torch.Generator().manual_seed(5)
    for index in range(CHECKPOINTS):
        path = hf_model(workbench.work / f"step{index}", sizes.compared, sizes.compared_length)
        file = path / "model.safetensors"
        tensors = load_file((paths or [path])[-1] / file.name)
        moved = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in tensors.items()
        }
        save_file(moved, file, metadata={"format": "pt"})
        paths.append(path)
    return paths


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """Places of checkpoints and losses on the grid."""
    sizes, paths = workbench.sizes, trajectory(workbench)
    tokens = max(25_000, 2 * SEQUENCES * sizes.compared_length)
    prefix = workbench.work / "text" / "held_out"
    text = token_file(prefix, sizes.compared.vocab_size, tokens=tokens, seed=2)
    settings = SliceSettings(grid=4, sequences=SEQUENCES, batch_size=2)
    here, there = (
        measure(paths, [], settings, text, Ranks(0, 1, device))["measured"]
        for device in (torch.device("cpu"), workbench.torch_device)
    )

    def apart(values: list[float], known: list[float]) -> float:
        """Return the largest difference over the largest value."""
        pairs = zip(values, known, strict=True)
        return max(abs(a - b) for a, b in pairs) / max(map(abs, known))

    def places(result: dict[str, Any]) -> list[float]:
        return [point[axis] for point in result["points"] for axis in "xy"]

    def losses(result: dict[str, Any]) -> list[float]:
        return [loss for row in result["grid"]["loss"] for loss in row]

    what = "plane of a trajectory, CPU against GPU"
    return [
        CheckedFigure(f"{what}: places", apart(places(there), places(here)), "relative", most=1e-9),
        CheckedFigure(f"{what}: losses", apart(losses(there), losses(here)), "relative", most=1e-5),
    ]
