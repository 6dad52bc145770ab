"""The same Hessian of an HF causal language model in three libraries, each made as its
documentation shows.

What they need of the model: eager attention, for the second derivative (sdpa has none on CPU);
curvlinops also an activation without torch's silu, whose derivative has none in forward mode.

Shapes: B sequences of a batch, S positions of a sequence, N tokens, V vocabulary, P parameters.
"""

from collections.abc import Callable, Sequence

import torch
from curvlinops import HessianLinearOperator
from hessian_eigenthings import HessianOperator, hf_lm_loss
from pyhessian import hessian
from torch import Tensor, nn
from transformers import PreTrainedModel

Product = Callable[[Tensor], Tensor]  # v_P -> (Hv)_P


class TokenLogits(nn.Module):
    """Logits of every token as rows, [N, V], for libraries that keep model and criterion apart."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_BS: Tensor) -> Tensor:
        logits_BSV: Tensor = self.model(inputs_BS, use_cache=False).logits
        return logits_BSV.flatten(0, 1)


class SpelledOutSilu(nn.Module):
    """x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def inputs_and_labels(tokens_BS1: Tensor) -> tuple[Tensor, Tensor]:
    """Input of the model, int64 [B, S], and the label of every token, int64 [N]."""
    return tokens_BS1[:, :-1], tokens_BS1[:, 1:].flatten()


def pyhessian_product(model: PreTrainedModel, batches: Sequence[Tensor]) -> Product:
    """Products by PyHessian, whose vectors are lists of tensors."""
    data = [inputs_and_labels(tokens_BS1) for tokens_BS1 in batches]
    library = hessian(TokenLogits(model), nn.CrossEntropyLoss(), dataloader=data, cuda=False)

    def product(v_P: Tensor) -> Tensor:
        pieces = v_P.split([weight.numel() for weight in library.params])
        vector = [
            piece.view_as(weight) for piece, weight in zip(pieces, library.params, strict=True)
        ]
        _, hv = library.dataloader_hv_product(vector)
        return torch.cat([part.flatten() for part in hv])

    return product


def curvlinops_product(model: PreTrainedModel, batches: Sequence[Tensor]) -> Product:
    """Products by curvlinops, without the check that it begins with."""
    for layer in model.get_decoder().layers:
        layer.mlp.act_fn = SpelledOutSilu()
    operator = HessianLinearOperator(
        TokenLogits(model),
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [inputs_and_labels(tokens_BS1) for tokens_BS1 in batches],
        check_deterministic=False,
        num_data=sum(map(len, batches)),
    )

    def product(v_P: Tensor) -> Tensor:
        hv_P: Tensor = operator @ v_P
        return hv_P

    return product


def eigenthings_product(model: PreTrainedModel, batches: Sequence[Tensor]) -> Product:
    """Products by hessian-eigenthings."""
    data = [{"input_ids": tokens_BS1, "labels": tokens_BS1} for tokens_BS1 in batches]
    return HessianOperator(model, data, hf_lm_loss()).matvec


# Products with the Hessian of the mean loss over batches of one size.
LIBRARIES: dict[str, Callable[[PreTrainedModel, Sequence[Tensor]], Product]] = {
    "PyHessian": pyhessian_product,
    "curvlinops": curvlinops_product,
    "hessian-eigenthings": eigenthings_product,
}
