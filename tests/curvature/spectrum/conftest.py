"""The Hessian of a trained model as an operator whose whole spectrum is known."""

import pytest
import torch
import torch.nn.functional as F

from tests.curvature.conftest import dense_hessian, random_tokens, tiny_model
from tests.curvature.spectrum.operators import Known


@pytest.fixture(scope="session")
def trained() -> Known:
    """The Hessian of 840 trained parameters: few outliers, a bulk at 0, a negative tail."""
    model = tiny_model(std=0.3, num_hidden_layers=1, vocab_size=16)
    tokens_BS1 = random_tokens(batch=4, length=6) % 16
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        logits_BSV = model(tokens_BS1[:, :-1], use_cache=False).logits
        optimizer.zero_grad()
        F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten()).backward()
        optimizer.step()
    hessian_PP = dense_hessian(model, tokens_BS1).hessian_PP
    hessian_PP = (hessian_PP + hessian_PP.T) / 2
    return Known(hessian_PP, torch.linalg.eigvalsh(hessian_PP))
