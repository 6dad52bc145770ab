"""Figures of docs/design/megatron-core.md: parts of megatron-core beside those that are ours.

python -m tests.bench.megatron padding      # of its layer-wise layout, for OLMo2's matrices
python -m tests.bench.megatron instances    # of optimizer shards on 512 replicas of a 7B
python -m tests.bench.megatron loss KIND    # ours, unfused, fused: memory and error, on a CPU
torchrun --nproc-per-node 2 -m tests.bench.megatron formats   # bytes that each rank writes
"""

import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.runs import make_run
from train.distributed import start
from train.model.config import parameter_shapes
from train.model.presets import OLMO2_7B

SIZES = {"190M": (768, 3072, 12), "1B": (2048, 8192, 16), "7B": (4096, 11008, 32)}
TOKENS, WIDTH, ROWS = 4096, 128, 32_768


def padding() -> None:
    """Print what a layout costs in which no hidden matrix is cut: whole ones on every rank."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
    for name, (width, middle, layers) in SIZES.items():
        shapes = [(3 * width, width), (width, width), (2 * middle, width), (width, middle)]
        matrices = [
            torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes * layers
        ]
        count = sum(matrix.numel() for matrix in matrices)
        for ranks in (8, 64, 512):
            layout = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
                matrices, max(40_000_000, 1_000_000 * ranks), ranks, settings
            )
            extra = layout.bucket_indices[-1][1] - count
            size = 6 * extra / 1e9  # a weight in bf16 and its gradient in fp32
            print(f"{name} on {ranks} ranks: {extra / count:+.0%}, {size:.1f} GB a GPU")


def instances() -> None:
    """Print what several sets of optimizer shards cost and save, by counts of ring algorithms.

    Gradients are in fp32, weights in bf16; a shard has a main weight and two moments. Messages in a
    row are those of a bucket. Their times are assumed; only those of the last bucket of gradients
    and the first of weights do not hide beside computation.
    """
    shapes = parameter_shapes(OLMO2_7B).values()
    count, replicas, node = sum(torch.Size(shape).numel() for shape in shapes), 512, 8
    inside, between = 2e-6, 8e-6  # seconds of a message on NVLink, and on InfiniBand
    for sets in (1, 8, 64):
        ranks = replicas // sets
        reduced, gathered = (size * count * (ranks - 1) / ranks / 1e9 for size in (4, 2))
        summed = 2 * 4 * count / ranks * (sets - 1) / sets / 1e9
        crossings = ranks // node - 1 + (ranks > node)
        one_way = crossings * between + (ranks - 1 - crossings) * inside
        seconds = 2 * one_way + 2 * (sets - 1) * between
        print(
            f"{sets} of {ranks} ranks: a GPU sends {reduced:.1f} + {summed:.1f} GB of gradients and"
            f" {gathered:.1f} of weights; {2 * (ranks - 1) + 2 * (sets - 1)} messages in a row,"
            f" {seconds * 1e3:.1f} ms; shards of {12 * count / ranks / 1e9:.2f} GB"
        )


def loss(kind: str) -> None:
    """Print peak memory and errors of one cross-entropy over a head in bf16, without z-loss."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from train.model.losses import Targets, head_losses

    start()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, 1, WIDTH).bfloat16().requires_grad_()
    weight = (torch.randn(ROWS, WIDTH) * 0.05).bfloat16().requires_grad_()
    labels = torch.randint(0, ROWS, (TOKENS,))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "ours":
        targets = Targets(labels, torch.ones(TOKENS, dtype=torch.bool), 0.0)
        value, _ = head_losses(hidden.flatten(0, 1), weight, targets)
    elif kind == "unfused":
        value = vocab_parallel_cross_entropy(hidden @ weight.t(), labels[:, None]).mean()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        logits = hidden @ weight.t()
        value = fused_vocab_parallel_cross_entropy(logits, labels[:, None], group).mean()
    value.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    for part in torch.arange(TOKENS).split(512):
        logits = exact[0][part, 0] @ exact[1].t()
        (F.cross_entropy(logits, labels[part], reduction="sum") / TOKENS).backward()
    errors = []
    for x, y in zip((hidden, weight), exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        errors.append(float((x.grad.double() - y.grad).norm() / y.grad.norm()))
    print(f"{kind}: {peak / 1024:.0f} MiB, errors of both gradients {errors}")


def formats() -> None:
    """Print the bytes of optimizer state that each rank holds, prepares and writes."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        ShardedTensorFactory,
        is_main_replica,
    )

    from train.megatron.engine import MegatronEngine

    with tempfile.TemporaryDirectory() as directory:
        nowhere: Any = Path(directory)
        inputs = dict.fromkeys(("train_prefix", "held_out_prefix", "tokenizer_dir"), nowhere)
        run = make_run(nowhere / "run", precision="bf16", **inputs)
    device = start()
    engine = MegatronEngine(run, device)
    model, optimizer = engine._model_state()["model"], engine._optimizer
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    states = {
        "ours": engine._state.to_save(model),
        "dp_reshardable": optimizer.sharded_param_state_dp_reshardable(model, metadata=groups),
        "fully_reshardable": optimizer.sharded_param_state_fully_reshardable(
            model, metadata=groups
        ),
    }
    held_bytes = sum(12 * piece.inner.numel() for piece in engine._state.pieces)
    kinds = ShardedTensor | ShardedTensorFactory
    for name, state in states.items():
        entries = [x for x in nested_values(state) if isinstance(x, kinds)]
        prepared = sum(x.data.nbytes for x in entries)
        written = sum(x.data.nbytes for x in entries if is_main_replica(x.replica_id))
        print(
            f"{name}, rank {dist.get_rank()}: {held_bytes} held, {prepared} prepared, {written} written"
        )
    engine.close()


if __name__ == "__main__":
    chosen: dict[str, Callable[..., None]] = {
        "padding": padding,
        "instances": instances,
        "loss": loss,
        "formats": formats,
    }
    chosen[sys.argv[1]](*sys.argv[2:])
