"""A command of the project on a stand-in for a GPU: `-m tests.rehearsal.on_stand_in MODULE WORDS`.

Ranks talk by gloo in place of NCCL, and every one sees its own GPU as the only one.
"""

import runpy
import sys
from unittest import mock

from tests.rehearsal.stand_in import gpu, without_attention_kernels, without_nccl

if __name__ == "__main__":
    del sys.argv[0]
    timed = mock.patch("train.monitoring.product_seconds", return_value=1.0)
    with without_nccl(), timed, gpu(), without_attention_kernels():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
