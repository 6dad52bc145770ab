"""The loss of a model on a fixed text, sequence by sequence.

Shapes: B sequences, S positions of a sequence, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel


class SequenceLosses:
    """The losses of B sequences at whatever the model's weights are when it is called.

    Sequences go through the model in the same batches every time, so that the same weights give the
    same bits.

    Attributes:
        weights: the model's own parameters by name; a tied one is there once.
        sequences: B.
    """

    def __init__(self, model: PreTrainedModel, tokens_BS1: Tensor, batch_size: int) -> None:
        self.weights: dict[str, Tensor] = dict(model.named_parameters())
        self.sequences = len(tokens_BS1)
        self._model = model
        self._batches = tokens_BS1.to(model.device).split(batch_size)

    def __call__(self) -> Tensor:
        """Return the mean cross-entropy of every sequence, nats per token, float64 [B]."""
        with torch.inference_mode():
            means = [self._nats(tokens_BS1).double().mean(dim=1) for tokens_BS1 in self._batches]
        return torch.cat(means).cpu()

    def _nats(self, tokens_BS1: Tensor) -> Tensor:
        logits_BSV: Tensor = self._model(input_ids=tokens_BS1[:, :-1], use_cache=False).logits
        labels_BS1 = tokens_BS1[:, 1:, None]
        return logits_BSV.logsumexp(dim=-1) - logits_BSV.gather(-1, labels_BS1).squeeze(-1)


def mean_and_error(values_B: Tensor) -> tuple[float, float]:
    """Return mean and standard error over sequences; of differences, the paired error."""
    return float(values_B.mean()), float(values_B.std() / len(values_B) ** 0.5)
