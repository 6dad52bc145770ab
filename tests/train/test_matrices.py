"""Whole matrices are computed evenly over ranks, wherever they are held, and to the same bits."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from tests.ckpt_tools.checkpoints import read_shards
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, save
from tests.train.test_even_writing import BUCKETS
from train.distributed import start
from train.engines import build_engine
from train.model.config import hidden_matrices, parameter_shapes
from train.model.initialization import initial_parameter
from train.model.presets import OLMO2_1B, OLMO2_7B, OLMO2_190M
from train.optimizers import matrices
from train.optimizers.muon import Muon, orthogonalized
from train.optimizers.soap import Soap
from train.run.config import load_run

MUON = Muon(peak_lr=1e-2)
OPTIMIZERS = {"muon": MUON, "soap": Soap(peak_lr=1e-2, refresh_updates=1)}
# The least that the largest rank can do, over the mean. A layer of the 1B and the 190M has four
# matrices of one unit of work and three of three units: 208 units on 64 ranks are 3.25 for each,
# and four for one; 156 units are 2.4, and the largest matrix is three. On 512 ranks there are fewer
# matrices than ranks, and one rank does the largest.
FEW = {("1B", 64): 4 / 3.25, ("190M", 64): 3 / (156 / 64)}
MODELS = {"7B": OLMO2_7B, "1B": OLMO2_1B, "190M": OLMO2_190M}


def shapes_of(size: str) -> list[tuple[int, ...]]:
    model = MODELS[size]
    hidden = hidden_matrices(model)
    return [shape for name, shape in parameter_shapes(model).items() if name in hidden]


@pytest.mark.parametrize("size", MODELS)
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_no_rank_computes_much_more_than_the_mean(size, ranks):
    """All ranks begin a round together, so a step takes the largest of every round."""
    shapes = shapes_of(size)
    flops = [MUON.direction_flops(shape) for shape in shapes]
    elements = [torch.Size(shape).numel() for shape in shapes]
    seconds, computed = 0.0, []
    for assigned in matrices.rounds(flops, elements, ranks):
        assert len(assigned) == ranks
        seconds += max(sum(flops[index] for index in indices) for indices in assigned)
        computed += [index for indices in assigned for index in indices]
        held = max(sum(elements[index] for index in indices) for indices in assigned)
        assert held <= 1.35 * matrices.ROUND_ELEMENTS  # smaller matrices take more for a FLOP
    assert sorted(computed) == list(range(len(shapes)))
    mean = sum(flops) / ranks
    if ranks == 512:
        assert seconds == max(flops)
    else:
        assert seconds <= FEW.get((size, ranks), 1.1) * mean * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(64, 32), (32, 48)])
def test_flops_are_those_that_torch_counts(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonalized(torch.ones(shape, device="meta"), torch.float32)
    assert counter.get_total_flops() == MUON.direction_flops(shape)


def update_all(round_elements: str, *run_dirs: str) -> None:
    """Worker, on every rank: updates of several runs by gradients that are drawn, at any layout."""
    device = start()
    for run_dir in map(Path, run_dirs):
        run = load_run(run_dir / "run.json")
        with (
            mock.patch.object(matrices, "ROUND_ELEMENTS", int(round_elements)),
            mock.patch.multiple("train.megatron.data_parallel", **BUCKETS),
        ):
            engine = build_engine(run, device)
        update(engine, run)
        save(engine, run_dir / "out", weights_only=True)
        leave_layout(run)
    engine.close()


def update(engine, run):
    """Two updates, after SOAP's first one, which moves no matrix."""
    draw_weights(engine, run)
    for step in range(3):
        # As from a checkpoint: what is set whole is cut as the weights are.
        draw = {
            name: initial_parameter(name, run.model, 10 + step)
            for name in parameter_shapes(run.model)
        }
        saved = [weights.clone() for weights in engine.weights()]
        engine.start_from(draw.__getitem__)
        gradients = [weights.clone() for weights in engine.weights()]
        for weights, before, gradient in zip(engine.weights(), saved, gradients, strict=True):
            weights.copy_(before)
            owner = next(
                parameter
                for group in inner(engine).param_groups
                for parameter in group["params"]
                if parameter.data_ptr() == weights.data_ptr()
            )
            padding = 0, owner.numel() - gradient.numel()
            owner.grad = torch.nn.functional.pad(gradient, padding)
        inner(engine).set_rate(1e-2)
        inner(engine).step()
        engine.publish_weights()


def inner(engine):
    """The optimizer that both engines step."""
    return engine._optimizer if hasattr(engine, "_sharding") else engine._optimizer.optimizer


@pytest.mark.parametrize(
    ("engine", "layout"),
    [("megatron", {}), ("megatron", {"tensor": 2}), ("deepspeed", {})],
)
def test_updates_on_four_ranks_are_those_of_one(tmp_path, inputs, engine, layout):
    """Bit for bit, with the buckets of GPUs and several rounds."""
    settings = {"layers": 3, "kv_heads": 2, "engine": engine, "micro_batch_size": 2}
    runs = {
        name: make_run(tmp_path / "one" / name, **inputs, **settings, optimizer=optimizer)
        for name, optimizer in OPTIMIZERS.items()
    }
    for name, optimizer in OPTIMIZERS.items():
        make_run(tmp_path / "four" / name, **inputs, **settings, **layout, optimizer=optimizer)
    on_ranks(1, update_all, 1 << 28, *(tmp_path / "one" / name for name in runs))
    on_ranks(4, update_all, 2500, *(tmp_path / "four" / name for name in runs))
    for name, run in runs.items():
        one, four = (
            weights_in(tmp_path / ranks / name / "out", run, engine) for ranks in ("one", "four")
        )
        for key in hidden_matrices(run.model):
            assert torch.equal(one[key], four[key]), (name, key)
            assert not torch.equal(one[key], initial_parameter(key, run.model, run.seed)), key


def weights_in(checkpoint, run, engine):
    """The weights of a checkpoint by HF name."""
    if engine == "megatron":
        return read_shards(checkpoint, run.model)
    return {
        key: weight
        for path in checkpoint.glob("model*.safetensors")
        for key, weight in load_file(path).items()
    }
