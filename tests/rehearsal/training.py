"""`python -m tests.rehearsal.training cpu|gpu RUN_DIR [PLACE]`: trains; a PLACE leaves its
tensors on the CPU.

Either attends by products of matrices, as in `tests.rehearsal.conftest`.
"""

import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.rehearsal.stand_in import gpu, without_attention_kernels
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.launch import Launch

initialize = dist.init_process_group


def train(path: Path) -> None:
    """The loop, imported where it is known whether there is a GPU."""
    from train.loop import train as loop

    with sdpa_kernel(SDPBackend.MATH):
        loop(path, load_run(RunDirectory(path).run_json), Launch())


if __name__ == "__main__":
    device, path, *left = sys.argv[1:]
    if device == "cpu":
        train(Path(path))
    else:
        gloo = mock.patch.object(
            dist, "init_process_group", side_effect=lambda *_, **_settings: initialize("gloo")
        )
        timed = mock.patch("train.monitoring.product_seconds", return_value=1.0)
        with gloo, timed, gpu(*left) as stand_in, without_attention_kernels():
            train(Path(path))
        assert stand_in.places
        assert not stand_in.on_cpu, stand_in.on_cpu
