"""Losses of a model and of quantized ones on the same documents, each document on its own.

Shapes: B blocks of a batch, L tokens of the longest, T targets of a batch, V vocabulary, D documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from train.command import Progress, UserError
from train.corpus import Corpus


@dataclass(frozen=True)
class EvaluationSet:
    """Documents cut into blocks.

    Attributes:
        blocks: tokens of each block; all but the first are its targets.
        owner: for each block, its document as an index into `documents`.
        documents: indices into the corpus of the documents that have a target, in file order.
        without_target: number of documents passed over because they are shorter than 2 tokens.
    """

    blocks: list[NDArray[np.int64]]
    owner: list[int]
    documents: list[int]
    without_target: int


@dataclass(frozen=True)
class PairedLosses:
    """Sums over the targets of each document, float64 [D]; nats, except `tokens` and `agreements`, which count."""

    tokens: NDArray[np.float64]
    nll: NDArray[np.float64]
    nll_quantized: NDArray[np.float64]
    kl: NDArray[np.float64]
    agreements: NDArray[np.float64]


def evaluation_set(corpus: Corpus, sequence_length: int, max_tokens: int | None) -> EvaluationSet:
    """Cuts documents, in file order, until their targets number at least `max_tokens` (None: all documents).

    Block i holds tokens i x L .. i x L + L of its document, so every token but a document's first is a target once.
    """
    blocks: list[NDArray[np.int64]] = []
    owner: list[int] = []
    documents: list[int] = []
    without_target = tokens = 0
    for index in range(len(corpus.bounds_D) - 1):
        if max_tokens is not None and tokens >= max_tokens:
            break
        document_T = corpus.document(index)
        if len(document_T) < 2:
            without_target += 1
            continue
        for start in range(0, len(document_T) - 1, sequence_length):
            blocks.append(document_T[start : start + sequence_length + 1])
            owner.append(len(documents))
        documents.append(index)
        tokens += len(document_T) - 1
    if len(documents) < 2:
        raise UserError(
            f"{corpus.prefix}: {len(documents)} evaluated document(s); an interval paired over documents needs at "
            f"least 2, prepare more text or raise --eval-tokens"
        )
    return EvaluationSet(blocks, owner, documents, without_target)


def _padded(blocks: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and targets, int64 [B, L], and which of them are real. Attention is causal: padding right is unseen."""
    lengths_B = torch.tensor([len(block) - 1 for block in blocks])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(block) for block in blocks], batch_first=True)
    is_real_BL = torch.arange(tokens.shape[1] - 1)[None] < lengths_B[:, None]
    return tokens[:, :-1], tokens[:, 1:], is_real_BL


def _log_probabilities(model: Any, inputs_BL: Tensor, is_real_BL: Tensor) -> Tensor:
    """Log-softmax in fp32 at the real positions, [T, V]."""
    hidden_BLD = model.model(input_ids=inputs_BL, use_cache=False).last_hidden_state
    return torch.log_softmax(model.lm_head(hidden_BLD[is_real_BL]).float(), dim=-1)


@torch.no_grad()
def paired_losses(
    full: Any, quantized: Sequence[Any], data: EvaluationSet, batch_size: int, progress: Progress
) -> list[PairedLosses]:
    """For each quantized model, its losses beside those of the full-precision model, which runs once per batch.

    Per target with full distribution p and quantized distribution q: -log p(target), -log q(target),
    KL(p || q) = sum_v p_v (log p_v - log q_v), and whether p's most likely token is most likely under q too.
    """
    device = full.lm_head.weight.device
    num_documents = len(data.documents)
    tokens_D, nll_D = torch.zeros(2, num_documents, dtype=torch.float64)
    sums_SD3 = torch.zeros(len(quantized), num_documents, 3, dtype=torch.float64)
    # Blocks of similar length go together, so that little is padded.
    by_length = sorted(range(len(data.blocks)), key=lambda index: -len(data.blocks[index]))
    for start in range(0, len(by_length), batch_size):
        chosen = by_length[start : start + batch_size]
        inputs_BL, targets_BL, is_real_BL = _padded([data.blocks[index] for index in chosen])
        owner_T = torch.tensor([data.owner[index] for index in chosen]).repeat_interleave(is_real_BL.sum(1))
        inputs_BL, is_real_BL = inputs_BL.to(device), is_real_BL.to(device)
        targets_T1 = targets_BL.to(device)[is_real_BL][:, None]
        log_p_TV = _log_probabilities(full, inputs_BL, is_real_BL)
        p_TV, top_T1 = log_p_TV.exp(), log_p_TV.argmax(-1, keepdim=True)
        tokens_D.index_add_(0, owner_T, torch.ones(len(owner_T), dtype=torch.float64))
        nll_D.index_add_(0, owner_T, -log_p_TV.gather(1, targets_T1).squeeze(1).double().cpu())
        for model, sums_D3 in zip(quantized, sums_SD3, strict=True):
            log_q_TV = _log_probabilities(model, inputs_BL, is_real_BL)
            nll_T = -log_q_TV.gather(1, targets_T1).squeeze(1)
            agrees_T = log_q_TV.gather(1, top_T1).squeeze(1) == log_q_TV.amax(-1)
            kl_T = (log_p_TV - log_q_TV).mul_(p_TV).sum(-1)
            sums_D3.index_add_(0, owner_T, torch.stack([nll_T, kl_T, agrees_T.float()], dim=1).double().cpu())
        progress.advance(len(chosen))
    return [
        PairedLosses(tokens_D.numpy(), nll_D.numpy(), *(column_D.numpy() for column_D in sums_D3.unbind(1)))
        for sums_D3 in sums_SD3
    ]
