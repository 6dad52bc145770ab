"""megatron-core on the stand-in: engine, optimizer, checkpoints, resuming, without NCCL; a step
waits for the GPU once, where it asks for losses and norm.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import widths
from tests.rehearsal.stand_in import COPIES, READ_ON_HOST, OnGPU, gpu
from tests.runs import draw_weights, make_run, python
from train.model.config import Llama3Scaling, ModelConfig
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.environment import attempts
from train.run.metrics import read_metrics
from train.run.optimization import CosinePhase, ScheduleConfig, SmallerBatch
from train.run.probe import ProbeConfig

SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
FIGURES = ("loss", "z_loss", "grad_norm", "held_out_loss")
SHORT: dict[str, Any] = {
    "total_steps": 3,
    "save_steps": (0, 2, 3),
    "evaluate_every_steps": 2,
    "probe": ProbeConfig(every_steps=2, sequences=4, group_size=16),
    "schedule": ScheduleConfig(warmup_tokens=256, phase=CosinePhase(horizon_tokens=100 * 256)),
}


def figures(directory):
    rows = read_metrics(RunDirectory(directory).metrics)
    return [
        {name: row[name] for name in row if name in FIGURES or name.startswith("quantization/")}
        for row in rows
    ]


@pytest.mark.parametrize(("precision", "tied"), [("fp32", True), ("bf16", False)])
def test_a_run_on_a_gpu_has_the_losses_of_one_on_the_cpu(tmp_path, inputs, precision, tied):
    model = ModelConfig(
        **widths(32, 64, 4, 4, vocab_size=320, num_hidden_layers=2),
        tie_word_embeddings=tied,
        rope_scaling=SCALING if tied else None,
    )
    for device in ("cpu", "gpu"):
        make_run(tmp_path / device, **inputs, **SHORT, precision=precision, model=model)
        done = python("tests.rehearsal.processes", device, str(tmp_path / device))
        assert done.returncode == 0, done.stderr[-3000:]
    assert len(figures(tmp_path / "gpu")) == 4
    assert figures(tmp_path / "gpu") == figures(tmp_path / "cpu")
    (attempt,) = attempts(RunDirectory(tmp_path / "gpu").environment_json)
    assert attempt["kernels"]["attention"] == "math"  # as the rehearsal wants it


def test_a_run_by_a_graph_has_the_losses_of_one_without(tmp_path, inputs):
    """In 8 microbatches, of which 6 are replayed; in a warm-up of the batch size there are 4."""
    split: dict[str, Any] = {
        "micro_batch_size": 1,
        "batch_warmup": (SmallerBatch(until_step=1, batch_size=4),),
        "precision": "bf16",
        "recompute": "layers",
    }
    for device in ("cpu", "gpu"):
        make_run(tmp_path / device, **inputs, **SHORT, **split, cuda_graphs=device == "gpu")
        done = python("tests.rehearsal.processes", device, str(tmp_path / device))
        assert done.returncode == 0, done.stderr[-3000:]
    assert len(figures(tmp_path / "gpu")) == 4
    assert figures(tmp_path / "gpu") == figures(tmp_path / "cpu")


def test_a_tensor_left_on_the_cpu_is_found(tmp_path, inputs):
    make_run(tmp_path / "run", **inputs, **SHORT)
    left = "train/data/batches.py Batch.microbatches"
    done = python("tests.rehearsal.processes", "gpu", str(tmp_path / "run"), left)
    assert done.returncode != 0
    assert "MixedDevicesError" in done.stderr


class Transfers(TorchDispatchMode):
    """Counts what crosses between the host and the stand-in while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, and hands on to the stand-in."""
        result = func(*args, **(kwargs or {}))
        on_gpu = any(isinstance(each, OnGPU) for each in args)
        if func._overloadpacket in READ_ON_HOST and on_gpu:
            self.counted["to host"] += 1
        if func._overloadpacket in COPIES:
            target, source = (
                (result, args[0]) if func._overloadpacket is torch.ops.aten._to_copy else args[:2]
            )
            if isinstance(target, OnGPU) != isinstance(source, OnGPU):
                self.counted["to host" if isinstance(source, OnGPU) else "to GPU"] += 1
        return result


@contextmanager
def transfers() -> Iterator[Counter[str]]:
    """The counts of what crosses within the block."""

    def to_list(tensor: OnGPU) -> Any:
        mode.counted["to host"] += 1
        return tensor.on_cpu.tolist()

    with mock.patch.object(OnGPU, "tolist", to_list), Transfers() as mode:
        yield mode.counted


def count(run_dir: str) -> None:
    """Worker: prints the transfers of a step that is accepted, and clipped, and of one that is not."""
    from train.data.batches import Batch

    alone = "tcp://localhost:0"
    dist.init_process_group("gloo", init_method=alone, rank=0, world_size=1)
    with sdpa_kernel(SDPBackend.MATH), gpu():
        from train.distributed import start
        from train.megatron.engine import MegatronEngine

        run = load_run(Path(run_dir) / "run.json")
        engine = MegatronEngine(run, start())
        draw_weights(engine, run)
        tokens_BS = torch.randint(0, 320, (8, 33), generator=torch.Generator().manual_seed(0))
        batch = Batch.of(tokens_BS).of_replica(engine.replica)
        engine.train_step(batch, 1e-2, lambda _: True)
        for answer in (lambda _: True, lambda _: False):
            with transfers() as counted:
                engine.train_step(batch, 1e-2, answer, lambda: [1.0, 0.0])
            print(counted["to host"], counted["to GPU"])


def test_a_step_waits_for_the_gpu_once(tmp_path, inputs):
    """Tokens, which of them count, and flags come from the host, which waits for none of these."""
    make_run(tmp_path, **inputs)
    done = python("tests.rehearsal.test_training", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["1 3", "1 3"]


if __name__ == "__main__":
    count(sys.argv[1])
