"""Layers of the DeepSpeed engine, compiled: their losses and gradients, and their kernels."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.gpu.figures import CheckedFigure, SkippedError
from tests.gpu.workbench import Workbench, make_run, random_tokens
from train.deepspeed.model import ModelWithLosses, build_model, compile_layers
from train.model.losses import Targets

# By tests/train/test_compiled_layers.py 46, and 4 of attention; cuBLAS may add up parts of a
# product in a kernel of its own. Uncompiled there are some 110.
MOST_KERNELS = 60


def gradients(workbench: Workbench) -> list[CheckedFigure]:
    """Pythia's layers in bf16, compiled against uncompiled."""
    expected, found = (_gradients(each, workbench) for each in _both(workbench, 2))
    return [
        CheckedFigure(
            "gradients by compiled layers against uncompiled ones, in bf16",
            float((found - expected).norm() / expected.norm()),
            "relative",
            most=1.5e-2,
            note="either is 5e-3 from fp64 on a CPU",
        )
    ]


def kernels(workbench: Workbench) -> list[CheckedFigure]:
    """Kernels of such a layer that the profiler counts, forward and backward."""
    if workbench.device != "cuda":
        raise SkippedError("kernels of compiled layers need a GPU")
    by_depth = [[_kernels(each, workbench) for each in _both(workbench, depth)] for depth in (2, 4)]
    plain, compiled = ((many - few) / 2 for few, many in zip(*by_depth, strict=True))
    return [
        CheckedFigure("kernels of a layer, uncompiled", plain),
        CheckedFigure("kernels of a layer, compiled", compiled, most=MOST_KERNELS),
    ]


def _both(workbench: Workbench, depth: int) -> tuple[Any, Any]:
    """A model of so many layers with random weights, and a copy that is compiled."""
    sizes, settings = workbench.sizes, {"engine": "deepspeed", "precision": "bf16"}
    model = sizes.compared.model_copy(
        update={"family": "gpt_neox", "rotary_fraction": 0.25, "num_hidden_layers": depth}
    )
    run = make_run(workbench.work / "run", model, sizes.compared_length, steps=2, **settings)
    torch.manual_seed(0)
    plain: Any = build_model(run)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.normal_(mean=float("norm.weight" in name), std=0.05)
    plain.to(workbench.torch_device)
    compiled = copy.deepcopy(plain)
    compile_layers(compiled, workbench.torch_device)
    return ModelWithLosses(plain, "bf16"), ModelWithLosses(compiled, "bf16")


def _gradients(model: Any, workbench: Workbench) -> Tensor:
    """The gradient by all weights as one vector, in fp64 on the CPU."""
    sizes = workbench.sizes
    tokens_BS = random_tokens(4, sizes.compared_length + 1, sizes.compared.vocab_size)
    tokens_BS = tokens_BS.to(workbench.torch_device)
    labels_T = tokens_BS[:, 1:].flatten()
    targets = Targets(labels_T, torch.ones_like(labels_T, dtype=torch.bool), 0.0)
    loss, _ = model.train()(tokens_BS[:, :-1], None, targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.cpu().double().flatten() for gradient in gradients])


def _kernels(model: Any, workbench: Workbench) -> int:
    """Kernels that the GPU runs in forward and backward."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _gradients(model, workbench)
        workbench.synchronize()
    return sum(
        event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in profiled.events()
    )
