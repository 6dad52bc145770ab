"""Our exact products against three libraries that differentiate in other ways."""

import pytest
import torch

from base.ranks import ALONE
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from tests.conftest import widths
from tests.curvature.conftest import random_tokens, relative, tiny_model
from tests.curvature.libraries import LIBRARIES

# Wide enough, and with weights small enough, that fp32 rounds as it does in use.
MODEL = widths(64, 96, 4, 2)


def ours(dtype):
    return DualHessian(CurvedModel(tiny_model(dtype, std=0.1, **MODEL), ranks=ALONE))


def gaussian(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("direction", ["signs", "gaussian"])
def test_product_of_a_batch(library, direction):
    """fp32 on both sides: float64 is no stricter, as HF's norms and softmax are float32."""
    hessian, tokens = ours(torch.float32), random_tokens(batch=3)
    v_P = gaussian(hessian.parameters.size)
    v_P = v_P.sign() if direction == "signs" else v_P
    theirs_P = LIBRARIES[library](tiny_model(torch.float32, std=0.1, **MODEL), [tokens])(v_P)
    assert relative(hessian.product(tokens, v_P).hv_p, theirs_P.double()) < 1e-5


@pytest.mark.parametrize("library", LIBRARIES)
def test_product_of_several_batches_is_the_mean_of_ours(library):
    """So a trace over fresh batches and one over a data set are of the same Hessian."""
    hessian, batches = ours(torch.float32), [random_tokens(seed=seed) for seed in range(3)]
    v_P = gaussian(hessian.parameters.size)
    theirs_P = LIBRARIES[library](tiny_model(torch.float32, std=0.1, **MODEL), batches)(v_P)
    ours_P = torch.stack([hessian.product(tokens, v_P).hv_p for tokens in batches]).mean(0)
    assert relative(ours_P, theirs_P.double()) < 1e-5
