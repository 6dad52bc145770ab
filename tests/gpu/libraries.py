"""Other projects' libraries: their weights on the GPU against those on the CPU.

A job whose library computed elsewhere than it was told fails (`quant_eval.libraries.job`).
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant_eval.libraries.job import WEIGHTS, Job, run_job
from quant_eval.specs import parse_spec
from tests.gpu.figures import Figure, SkippedError
from tests.gpu.place import Place, hf_model, random_tokens

# Hessians in fp32, by other kernels: some codes fall on the other side. AWQ takes the best of 20
# scales, of which two can be as good: recorded.
LEAST = {"gptqmodel-b4-g32": 0.95, "gptaq-b4-g32": 0.95, "awq-b4-g32": None}


def cpu_and_gpu(place: Place) -> list[Figure]:
    """The same quantization on both, for every library that runs in a process of its own."""
    if place.device != "cuda":
        raise SkippedError("the processes of libraries need a GPU to be sent to")
    if not find_spec("gptqmodel") or not find_spec("llmcompressor"):
        raise SkippedError("gptqmodel and llmcompressor are not installed")
    model, length = place.sizes.compared, place.sizes.compared_length
    directory = hf_model(place.work / "model", model, length)
    ids = place.work / "ids.safetensors"
    save_file({"input_ids": random_tokens(48, length, model.vocab_size)}, ids)
    figures = []
    for spec, least in LEAST.items():
        here, there = (weights_of(place, directory, ids, spec, on) for on in ("cpu", "cuda"))
        equal = sum(int(torch.isclose(here[name], there[name], rtol=1e-3).sum()) for name in here)
        total = sum(weight.numel() for weight in here.values())
        name = f"{spec}, CPU against GPU: equal weights"
        figures.append(Figure(name, equal / total, "of all", least=least))
    return figures


def weights_of(
    place: Place, directory: Path, ids: Path, spec: str, device: Literal["cpu", "cuda"]
) -> dict[str, Tensor]:
    """The weights that the spec's library makes on a device."""
    job = Job(
        hf_dir=directory,
        spec=parse_spec(spec),
        calibration=ids,
        dtype="fp32",
        device=device,
        batch_size=8,
        threads=torch.get_num_threads(),
        out=place.work / f"{spec}-{device}",
    )
    run_job(job)
    return load_file(job.out / WEIGHTS)
