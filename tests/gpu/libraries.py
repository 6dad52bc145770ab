"""Other projects' libraries: their weights on the GPU against those on the CPU.

A job whose library computed elsewhere than it was told fails (`quant_eval.libraries.job`).
"""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gpu.figures import CheckedFigure, SkippedError
from tests.gpu.workbench import Workbench, hf_model, random_tokens
from tests.quant_eval.libraries.jobs import make_job, weights_of

SPECS = ("gptqmodel-b4-g32", "gptaq-b4-g32", "awq-b4-g32")
# The linears whose inputs are the same on both. After them a code that falls on the other side
# changes all inputs that follow: two runs on the CPU in other batches share 2 of 3 weights, too.
FIRST = ("q_proj", "k_proj", "v_proj")


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """The same quantization on both, for every library that runs in a process of its own."""
    if workbench.device != "cuda":
        raise SkippedError("the processes of libraries need a GPU to be sent to")
    if not find_spec("gptqmodel") or not find_spec("llmcompressor"):
        raise SkippedError("gptqmodel and llmcompressor are not installed")
    model, length = workbench.sizes.compared, workbench.sizes.compared_length
    directory = hf_model(workbench.work / "model", model, length)
    ids_NL = random_tokens(48, length, model.vocab_size)
    plain = load_file(directory / "model.safetensors")
    figures, threads = [], torch.get_num_threads()
    for spec in SPECS:
        out = workbench.work / spec
        jobs = [
            make_job(directory, spec, out / device, ids_NL, device=device, threads=threads)
            for device in ("cpu", "cuda")
        ]
        with ThreadPoolExecutor() as together:  # each is a process of its own
            here, there = together.map(weights_of, jobs)
        first = [f"model.layers.0.self_attn.{linear}.weight" for linear in FIRST]
        errors = [error_norm(weights, plain) for weights in (here, there)]
        name = f"{spec}, CPU against GPU"
        first_equal, equal = (equal_share(here, there, names) for names in (first, list(here)))
        moved = abs(errors[1] / errors[0] - 1)
        figures += [
            CheckedFigure(
                f"{name}: equal weights of the first linears", first_equal, "of all", least=0.99
            ),
            CheckedFigure(f"{name}: equal weights", equal, "of all"),
            CheckedFigure(f"{name}: norm of the error", moved, "relative difference", most=0.01),
        ]
    return figures


def equal_share(here: dict[str, Tensor], there: dict[str, Tensor], names: list[str]) -> float:
    """The share of the weights of these names that are equal but for rounding."""
    equal = sum(int(torch.isclose(here[name], there[name], rtol=1e-3).sum()) for name in names)
    return equal / sum(here[name].numel() for name in names)


def error_norm(weights: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """The Frobenius norm of all that quantization changed."""
    return sum(float((weights[name] - plain[name]).square().sum()) for name in weights) ** 0.5
