"""The curvature part of make bench: Hessian-vector products by this project and by three libraries.

    python -m tests.bench.curvature

One OLMo2 of 1.3 million parameters and a batch of 8 sequences of 128 tokens; fp32, one thread,
every contender in a process of its own. Seconds are CPU seconds, which is what counts on a busy
machine, as multiples of one forward and backward pass of transformers (sdpa attention) on that
batch, measured in the same process in turn. Peak memory is the high-water mark of one product, its
preparation included, above what the process held with the model and the vector loaded.

Shapes: N sequences, S positions of a sequence, V vocabulary, P parameters.
"""

import ctypes
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from base.ranks import ALONE
from ckpt_tools.hf.model import load_hf_model
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from tests.bench import line
from tests.conftest import make_hf_directory
from tests.curvature.conftest import differentiable_gradient
from tests.curvature.libraries import LIBRARIES, Product
from tests.runs import execute, succeed

VOCABULARY, SEQUENCES, LENGTH = 2048, 8, 128
REPETITIONS = 5
M_MMAP_THRESHOLD = -3  # of malloc.h
OURS = ("ours", "ours, checkpointing")
CONTENDERS = (*OURS, "double backward", *LIBRARIES)


def load(name: str, hf_dir: Path) -> PreTrainedModel:
    """The model for a contender: sdpa has no second derivative on a CPU."""
    attention = "sdpa" if name in (*OURS, "transformers") else "eager"
    return load_hf_model(hf_dir, torch.float32, attention=attention)


def double_backward(model: PreTrainedModel, tokens_NS1: Tensor) -> Product:
    """The gradient of g.v through the graph of g."""

    def product(v_P: Tensor) -> Tensor:
        _, gradient_P = differentiable_gradient(model, tokens_NS1)  # type: ignore[arg-type]
        parts = torch.autograd.grad(gradient_P @ v_P, list(model.parameters()))
        return torch.cat([part.flatten() for part in parts])

    return product


def product_of(name: str, model: PreTrainedModel, tokens_NS1: Tensor) -> Callable[[Tensor], object]:
    """One contender's v -> Hv on one batch."""
    if name in OURS:
        curved = CurvedModel(model, ranks=ALONE, checkpointing=name == "ours, checkpointing")
        hessian = DualHessian(curved)
        return lambda v_P: hessian.product(tokens_NS1, v_P)
    if name == "double backward":
        return double_backward(model, tokens_NS1)
    return LIBRARIES[name](model, [tokens_NS1])


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def cost(name: str, hf_dir: Path, tokens_NS1: Tensor) -> dict[str, float]:
    """Seconds of one product, and their median ratio to those of neighbouring gradients."""
    plain = load("transformers", hf_dir)
    product = product_of(name, load(name, hf_dir), tokens_NS1)
    v_P = torch.ones(plain.num_parameters())

    def gradient() -> None:
        logits_NSV = plain(tokens_NS1[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits_NSV.flatten(0, 1), tokens_NS1[:, 1:].flatten())
        torch.autograd.grad(loss, list(plain.parameters()))

    product(v_P)
    gradient()
    times = [(cpu_seconds(lambda: product(v_P)), cpu_seconds(gradient)) for _ in range(REPETITIONS)]
    return {
        "gradients": statistics.median(a / b for a, b in times),
        "seconds": statistics.median(a for a, _ in times),
    }


def peak(name: str, hf_dir: Path, tokens_NS1: Tensor) -> dict[str, float]:
    """High-water mark of this process's memory during one product, above what it held before.

    From its start on freed tensors go back to the system at once, which costs time: it is what was
    needed that counts, not how malloc fills its gaps. A product before it makes what stays for
    good.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    for _ in range(2):
        model = load(name, hf_dir)
        v_P = torch.ones(model.num_parameters())
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
        before = psutil.Process().memory_info().rss / 2**20
        product_of(name, model, tokens_NS1)(v_P)
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return {"peak_mib": int(match[1]) / 2**10 - before}


def child(task: str, name: str, hf_dir: Path) -> dict[str, float]:
    """The figures of one contender, from a process of its own."""
    command = [sys.executable, "-m", "tests.bench.curvature", task, name, str(hf_dir)]
    done = succeed(execute(command, timeout_seconds=1200))
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def curvature_lines() -> list[str]:
    """Time and memory of every contender, and memory against double backward."""
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
    }
    with tempfile.TemporaryDirectory() as scratch:
        hf_dir = Path(scratch) / "model"
        make_hf_directory(hf_dir, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **shape)
        costs = {
            name: child("cost", name, hf_dir) | child("peak", name, hf_dir) for name in CONTENDERS
        }
    lines = []
    for name, figures in costs.items():
        comparison = f"Hessian-vector product, {name} / forward and backward (HF)"
        remark = f"{figures['seconds']:.3f} s, peak {figures['peak_mib']:.0f} MiB above the model"
        lines.append(line(comparison, figures["gradients"], remark))
    for name in OURS:
        ratio = costs[name]["peak_mib"] / costs["double backward"]["peak_mib"]
        comparison = f"Hessian-vector product, peak memory: {name} / double backward"
        lines.append(line(comparison, ratio, "both above the model"))
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
        task = {"cost": cost, "peak": peak}[sys.argv[1]]
        print(json.dumps(task(sys.argv[2], Path(sys.argv[3]), batch)))
    else:
        print("\n".join(curvature_lines()))
