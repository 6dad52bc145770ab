"""A training step on the stand-in waits for the GPU once, where it asks for losses and norm."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.stand_in import COPIES, OnGPU, aten, gpu
from tests.runs import draw_weights, make_run, python
from train.engine import StepResult
from train.run.config import load_run

READ_ON_HOST = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal}


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
                (result, args[0]) if func._overloadpacket is aten._to_copy else args[:2]
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


def _answer(accepted: bool, _: StepResult) -> bool:
    return accepted


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
        for accepted in (True, False):
            with transfers() as counted:
                engine.train_step(batch, 1e-2, partial(_answer, accepted))
            print(counted["to host"], counted["to GPU"])


def test_a_step_waits_for_the_gpu_once(tmp_path, inputs):
    """Tokens, and which of them count, come from the host."""
    make_run(tmp_path, **inputs)
    done = python("tests.rehearsal.test_transfers", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["1 2", "1 2"]


if __name__ == "__main__":
    count(sys.argv[1])
