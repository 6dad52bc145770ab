"""The Hessian of a trained model as an operator whose whole spectrum is known."""

import pytest
import torch

from tests.curvature.conftest import dense_hessian, random_tokens, tiny_model
from tests.curvature.spectrum.operators import Known


@pytest.fixture(scope="session")
def trained() -> Known:
    """The Hessian of a model of 840 parameters after training: a few outliers, a bulk at 0, a
    negative tail.
    """
    model = tiny_model(std=0.3, num_hidden_layers=1, vocab_size=16)
    tokens_BS1 = random_tokens(batch=4, length=6) % 16
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        loss = (
            model(tokens_BS1[:, :-1], use_cache=False)
            .logits.log_softmax(-1)
            .gather(-1, tokens_BS1[:, 1:, None])
        )
        optimizer.zero_grad()
        (-loss.mean()).backward()
        optimizer.step()
    hessian_PP = dense_hessian(model, tokens_BS1).hessian_PP
    hessian_PP = (hessian_PP + hessian_PP.T) / 2
    return Known(hessian_PP, torch.linalg.eigvalsh(hessian_PP))
