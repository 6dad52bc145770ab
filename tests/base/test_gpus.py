"""Refusals before a rank takes its GPU."""

import pytest
import torch

from base.errors import UserError
from base.ranks import own_gpu


@pytest.fixture
def tf32():
    """torch as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets it."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_gpu_that_would_multiply_fp32_in_tf32_is_refused(tf32):
    with pytest.raises(
        UserError, match=r"in TF32 here, .*; set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0"
    ):
        own_gpu()
