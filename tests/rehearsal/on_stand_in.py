"""A check of tests/gpu on the stand-in for a GPU, in a process of its own."""

import json
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.gpu.checks import checks
from tests.gpu.workbench import IN_SMALL, Workbench
from tests.rehearsal.stand_in import gpu, without_attention_kernels

initialize = dist.init_process_group


def run_one(name: str, work: Path, out: Path) -> None:
    """Writes the figures of a check whose device is `cuda`; gloo takes the place of NCCL."""
    workbench = Workbench("cuda", IN_SMALL, work)
    gloo = mock.patch.object(
        dist, "init_process_group", side_effect=lambda *_, **_settings: initialize("gloo")
    )
    with gloo, gpu(), without_attention_kernels():
        figures = checks(workbench)[name](workbench)
    out.write_text(json.dumps([figure.described() for figure in figures]))
