"""Measurements whose work several GPUs share, against the same on one: GPTQ and the curvature."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.gpu.figures import CheckedFigure
from tests.gpu.launch import succeed
from tests.gpu.several import MOST_SECONDS
from tests.gpu.workbench import Workbench, hf_model, token_file

SPEC = "gptq-b4-g32-actorder"
SEQUENCES = 13  # a share of the ranks is never even


def measure(workbench: Workbench, *words: str) -> list[Path]:
    """Return the directories of the results of a command on one GPU and on all."""
    outs = []
    for ranks in (1, workbench.gpus):
        outs.append(workbench.work / f"on-{ranks}")
        command = (*words, "--device", workbench.device, "--out", str(outs[-1]))
        # What is shared by one is not sharded.
        if ranks == 1 and "--sharding" in command:
            at = command.index("--sharding")
            command = command[:at] + command[at + 2 :]
        succeed(workbench.start(ranks, *command), MOST_SECONDS)
    return outs


def model_of(workbench: Workbench) -> str:
    """Return a random model."""
    sizes = workbench.sizes
    return str(hf_model(workbench.work / "model", sizes.compared, sizes.compared_length))


def text_of(workbench: Workbench, name: str, seed: int) -> str:
    """Return the prefix of a random text."""
    sizes = workbench.sizes
    tokens = max(25_000, 2 * SEQUENCES * sizes.compared_length)
    prefix = workbench.work / "text" / name
    return str(token_file(prefix, sizes.compared.vocab_size, tokens=tokens, seed=seed))


def figures_of(out: Path) -> dict[str, Any]:
    """Return what a result has measured."""
    measured: dict[str, Any] = json.loads((out / "result.json").read_text())["measured"]
    return measured


def quantized(workbench: Workbench) -> list[CheckedFigure]:
    """GPTQ whose calibration and losses ranks share: weights and losses of one GPU."""
    calibration, held_out = text_of(workbench, "calibration", 1), text_of(workbench, "held_out", 2)
    texts = ("--calibration", calibration, "--eval", held_out, "--eval-tokens", "12000")
    words = ("quant_eval", "run", model_of(workbench), "--spec", SPEC, *texts, "--dense")
    outs = measure(workbench, *words, "--calibration-sequences", str(SEQUENCES))
    here, there = (
        {
            name: tensor
            for path in (out / "dense").glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        for out in outs
    )
    equal = sum(int(torch.isclose(here[name], there[name], rtol=1e-3).sum()) for name in here)
    total = sum(tensor.numel() for tensor in here.values())
    one, shared = map(figures_of, outs)
    what = f"{SPEC} on {workbench.gpus} GPUs against one"
    figures = [CheckedFigure(f"{what}: equal weights", equal / total, "of all", least=0.999)]
    limits = {"cross_entropy": 1e-6, "cross_entropy_quantized": 1e-4, "kl_divergence": 1e-2}
    return figures + [
        CheckedFigure(
            f"{what}: {name}", abs(shared[name] / one[name] - 1), "relative difference", most=most
        )
        for name, most in limits.items()
    ]


def curvature(workbench: Workbench) -> list[CheckedFigure]:
    """Traces and the top eigenvalue of a model that FSDP shards, against one GPU."""
    text = text_of(workbench, "held_out", 2)
    pairs = ("--pairs", "4", "--norm-pairs", "2", "--companion-pairs", "2")
    fixed = ("--fixed-sequences", "3", "--max-iterations", "8", "--microbatch-sequences", "2")
    words = ("curvature", "hutchinson", model_of(workbench), "--data", text, *pairs, *fixed)
    one, shared = map(figures_of, measure(workbench, *words, "--sharding", "fsdp"))
    what = f"curvature, FSDP over {workbench.gpus} GPUs against one"

    def moved(name: str) -> float:
        """Return the largest difference of a trace's microbatches, over the largest of them."""
        values, known = shared[name]["per_microbatch"], one[name]["per_microbatch"]
        largest = max(map(abs, known))
        return max(abs(a - b) for a, b in zip(values, known, strict=True)) / largest

    relative = {
        "loss": (shared["loss"] / one["loss"], 1e-5),
        "Gauss-Newton trace": (
            shared["gauss_newton_trace"]["mean"] / one["gauss_newton_trace"]["mean"],
            1e-4,
        ),
        "top eigenvalue": (shared["lambda_max"]["value"] / one["lambda_max"]["value"], 1e-3),
    }
    return [
        CheckedFigure(f"{what}: trace", moved("trace"), "relative difference", most=1e-4),
        *(
            CheckedFigure(f"{what}: {name}", abs(ratio - 1), "relative difference", most=most)
            for name, (ratio, most) in relative.items()
        ),
    ]
