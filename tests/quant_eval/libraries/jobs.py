"""Jobs of libraries on small models, and what their weights are compared by.

Shapes: N sequences, L tokens of a sequence, T tokens, I input features.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quant_eval.draws import Draw, save_draw
from quant_eval.libraries.job import WEIGHTS, Job, run_job
from quant_eval.specs import parse_spec
from tests.quant_eval.models import open_model


def random_ids(sequences: int, length: int, seed: int = 0) -> Tensor:
    """Tokens [N, L]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 320, (sequences, length), generator=generator)


def make_job(hf_dir: Path, spec: str, out: Path, ids_NL: Draw, **changes: Any) -> Job:
    """A job in fp32 on one thread of the CPU, in batches of 8, with its text beside `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    calibration = out.with_name(f"{out.name}.safetensors")
    save_draw(calibration, ids_NL)
    settings: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "batch_size": 8, "threads": 1}
    settings |= changes
    return Job(hf_dir=hf_dir, spec=parse_spec(spec), calibration=calibration, out=out, **settings)


def weights_of(job: Job) -> dict[str, Tensor]:
    """The weights that the job's library leaves."""
    run_job(job)
    return load_file(job.out / WEIGHTS)


def share_equal(left_OI: Tensor, right_OI: Tensor) -> float:
    """Steps of the grids here are above 0.01; fp32 noise of a scale is below 1e-6."""
    return float(((left_OI - right_OI).abs() < 1e-5).double().mean())


def linears_by_input(directory: Path) -> Iterator[list[str]]:
    """Names of the linears that read one input, in the order in which they compute."""
    model = open_model(directory)
    for index in range(model.num_blocks):
        yield from (list(group) for group in model.block(index).linears())


@torch.no_grad()
def inputs_of(model: Any, linear: str, draw: Draw) -> Tensor:
    """Input of a linear, float64 [T, I], one sequence after the other."""
    seen: list[Tensor] = []
    handle = model.get_submodule(linear).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    for ids_L in draw:
        model(ids_L[None])
    handle.remove()
    return torch.cat(seen, dim=1)[0].double()
