"""Commands run in this process, on the CPU and on the stand-in for a GPU."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import make_hf_directory
from tests.rehearsal.stand_in import MixedDevicesError, gpu


def command(module: str, *arguments: object) -> None:
    """`python -m MODULE ARGUMENTS`.

    The stand-in has no attention kernels of its own: either side takes the one that is made of
    products of matrices.
    """
    app = importlib.import_module(f"{module}.__main__").app
    with sdpa_kernel(SDPBackend.MATH):
        app([str(argument) for argument in arguments], standalone_mode=False)


def measured(out: Path) -> dict[str, Any]:
    """The figures of a result."""
    figures: dict[str, Any] = json.loads((out / "result.json").read_text())["measured"]
    return figures


# Small matrices of transforms, before they go to the GPU.
MADE_ON_CPU = {
    "quant_eval/transforms/steps.py _inverse",
    "quant_eval/learned.py Rotations.__init__",
    "curvature/slices/principal.py principal_plane",  # as many numbers as checkpoints squared
}


def rehearse(out: Path, module: str, *arguments: object) -> None:
    """A command with --device cuda reaches every figure of the same with --device cpu, and
    multiplies on the GPU.

    Both take the same operations of the CPU in the same order, so they have the same bits.
    """
    command(module, *arguments, "--out", out / "cpu", "--device", "cpu")
    with gpu() as stand_in:
        command(module, *arguments, "--out", out / "gpu", "--device", "cuda")
    assert measured(out / "gpu") == measured(out / "cpu")
    assert stand_in.places
    assert stand_in.on_cpu <= MADE_ON_CPU


def left_behind(left: str, module: str, *arguments: object) -> None:
    """A command is refused whose function `left` leaves its tensors on the CPU: a planted fault."""
    with gpu(left) as stand_in, pytest.raises(MixedDevicesError):
        command(module, *arguments, "--device", "cuda")
    assert left in stand_in.places


@pytest.fixture(scope="package")
def model(tmp_path_factory) -> Path:
    """An OLMo2 of one block with grouped queries; no test may write below it."""
    root = tmp_path_factory.mktemp("rehearsal")
    return make_hf_directory(root / "model", num_hidden_layers=1, num_key_value_heads=2)
