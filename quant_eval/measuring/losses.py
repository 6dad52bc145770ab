"""Losses of a model and of quantized ones on the same documents, each document on its own.

Shapes: B blocks of a batch, L tokens of the longest, D hidden features, T targets, V vocabulary, N
    blocks, U units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from base.progress import Progress
from base.ranks import Ranks
from quant_eval.bos import begun
from quant_eval.measuring.documents import draw_documents
from quant_eval.model.activations import Activations
from train.data.corpus import Corpus

LOGITS_BYTES = 64 << 20  # of fp32 in memory at once, per model
CACHED_ROWS = 256  # of logits on a CPU: few enough to stay in its cache, enough to multiply well


@dataclass(frozen=True)
class EvaluationSet:
    """Documents cut into blocks.

    Attributes:
        blocks: tokens of each block; all but the first are its targets.
        owner: for each block, the unit it belongs to as an index into `documents`.
        documents: the units that intervals resample, in file order: corpus indices of the documents
            with a target, or the numbers of the blocks if documents are concatenated.
        without_target: number of documents passed over because they are shorter than 2 tokens.
    """

    blocks: list[NDArray[np.int64]]
    owner: list[int]
    documents: list[int]
    without_target: int

    def batches(self, batch_size: int) -> list[list[int]]:
        """Return blocks that are computed together: of similar length, so little is padded."""
        by_length = sorted(range(len(self.blocks)), key=lambda index: -len(self.blocks[index]))
        return [
            by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)
        ]

    def padded(self, batch: Sequence[int]) -> Tensor:
        """Tokens, int64 [B, L + 1]. Attention is causal: padding on the right is unseen."""
        blocks = [torch.from_numpy(self.blocks[index]) for index in batch]
        return torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)


@dataclass(frozen=True)
class PairedLosses:
    """Sums over each unit's targets, float64 [U]: nats, `tokens` and `agreements` are counts.

    `changes` sums `relative_change`.
    """

    tokens: NDArray[np.float64]
    nll: NDArray[np.float64]
    nll_quantized: NDArray[np.float64]
    kl: NDArray[np.float64]
    agreements: NDArray[np.float64]
    changes: NDArray[np.float64]


def evaluation_set(
    corpus: Corpus,
    sequence_length: int,
    max_tokens: int | None,
    mode: Literal["separate", "concatenated"],
    seed: int,
    bos: Sequence[int] = (),
) -> EvaluationSet:
    """Draw documents until they hold `max_tokens` targets, all if it is None, and cut them.

    Separate: block i holds tokens i x L .. i x L + L of its document, so every token but a
    document's first is a target once. Concatenated, as in arXiv:2510.06213: end-of-text tokens are
    dropped, the model reads blocks of L tokens of the joined documents, and all but a block's first
    are targets; what does not fill a block is dropped.

    `bos` comes before each document, or before all that are joined: then a document's first token
    is a target too. Which documents are drawn does not depend on it.
    """
    drawn_D = draw_documents(corpus, max_tokens, seed)
    units: list[int] = drawn_D[corpus.lengths_D[drawn_D] >= 2].tolist()
    without_target = len(drawn_D) - len(units)
    match mode:
        case "concatenated":
            joined_T = np.concatenate(
                [corpus.document(index) for index in units] or [np.empty(0, np.int64)]
            )
            joined_T = begun(joined_T[joined_T != corpus.manifest.eos_token_id], bos)
            count = len(joined_T) // sequence_length
            blocks = list(joined_T[: count * sequence_length].reshape(count, sequence_length))
            owner = units = list(range(count))
        case "separate":
            blocks, owner = [], []
            for unit, index in enumerate(units):
                document_T = begun(corpus.document(index), bos)
                # Blocks overlap by a token: the last target of one is the first input of the next.
                starts = range(0, len(document_T) - 1, sequence_length)
                blocks += [document_T[start : start + sequence_length + 1] for start in starts]
                owner += [unit] * len(starts)
        case _:
            assert_never(mode)
    return EvaluationSet(blocks, owner, units, without_target)


@torch.no_grad()
def paired_losses(
    head: nn.Module,
    full: Activations,
    quantized: Sequence[Activations],
    data: EvaluationSet,
    batches: Sequence[Sequence[int]],
    ranks: Ranks,
) -> list[PairedLosses]:
    """Return the losses of each quantized model with those of the full-precision model.

    Per target with full distribution p and quantized distribution q: -log p(target), -log
    q(target), KL(p || q) = sum_v p_v (log p_v - log q_v), whether p's most likely token is most
    likely under q too, and the `relative_change` of what the head reads.

    Args:
        head: norm and linear, which make logits; in fp32, as logits rounded to bf16 would add some
            3e-4 nats of divergence, as much as quantization to 8 bits, and tie.
        full: the residual stream after the last block, for this rank's batches.
        quantized: the same of each quantized model.
        data: the blocks and the units that they belong to.
        batches: this rank's, as indices of blocks of `data`.
        ranks: that share the batches; every rank has to call it.
    """
    count, device = len(data.blocks), ranks.device
    nll_N = torch.zeros(count, dtype=torch.float64)
    sums_SN4 = torch.zeros(len(quantized), count, 4, dtype=torch.float64)
    rows = None
    with Progress("losses", total=len(batches)) as progress:
        for index, batch in enumerate(batches):
            # targets of the batch without its padding, and the block of each
            tokens_BL = data.padded(batch)
            lengths_B = torch.tensor([len(data.blocks[block]) - 1 for block in batch])
            is_real_BL = torch.arange(tokens_BL.shape[1] - 1)[None] < lengths_B[:, None]
            targets_T1 = tokens_BL[:, 1:][is_real_BL][:, None].to(device)
            owner_T = torch.tensor(batch).repeat_interleave(lengths_B)

            # all models at the same targets, as many rows as there is memory for
            streams = [stream.read(index)[is_real_BL.to(device)] for stream in (full, *quantized)]
            rows = rows or _rows_at_once(head(streams[0][:1].float()).shape[-1], device)
            for start in range(0, len(owner_T), rows):
                some = slice(start, start + rows)
                target_T1, owner = targets_T1[some], owner_T[some]
                log_p_TV = torch.log_softmax(head(streams[0][some].float()), dim=-1)
                p_TV, top_T1 = log_p_TV.exp(), log_p_TV.max(-1, keepdim=True).indices
                nll_N.index_add_(0, owner, -log_p_TV.gather(1, target_T1).squeeze(1).double().cpu())
                for stream, sums_N4 in zip(streams[1:], sums_SN4, strict=True):
                    log_q_TV = torch.log_softmax(head(stream[some].float()), dim=-1)
                    nll_T = -log_q_TV.gather(1, target_T1).squeeze(1)
                    # By value: of several tokens that are most likely, any one agrees.
                    agrees_T = log_q_TV.gather(1, top_T1).squeeze(1) == log_q_TV.amax(-1)
                    # log q is read for the last time, so its memory takes the difference.
                    kl_T = torch.sub(log_p_TV, log_q_TV, out=log_q_TV).mul_(p_TV).sum(-1)
                    change_T = relative_change(streams[0][some], stream[some])
                    values_T4 = torch.stack([nll_T, kl_T, agrees_T.float(), change_T], dim=1)
                    sums_N4.index_add_(0, owner, values_T4.double().cpu())
            progress.advance()

    ranks.sum(nll_N)  # each block was one rank's alone, so nothing depends on how many there are
    ranks.sum(sums_SN4)
    owner_N = torch.tensor(data.owner)

    def by_unit(values_N: Tensor) -> NDArray[np.float64]:
        sums_U = torch.zeros(len(data.documents), dtype=torch.float64)
        return sums_U.index_add_(0, owner_N, values_N).numpy()

    tokens = by_unit(torch.tensor([len(block) - 1 for block in data.blocks], dtype=torch.float64))
    nll = by_unit(nll_N)
    return [
        PairedLosses(tokens, nll, *(by_unit(column_N) for column_N in sums_N4.unbind(1)))
        for sums_N4 in sums_SN4
    ]


def relative_change(full_TD: Tensor, quantized_TD: Tensor) -> Tensor:
    """Return |q - h|^2 / |h|^2 of each token, fp32 [T], of a stream h and a quantized model's q.

    After the last block, before the final norm, its mean over tokens is R_L of arXiv:2509.23500,
    which the errors of all layers have a part in. The paper's text was not at hand: that each
    token counts alike, rather than by its norm, is by what others write of it.

    Example:
        >>> full_TD, quantized_TD = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])
        >>> relative_change(full_TD, quantized_TD)
        tensor([0.0400])
    """
    full_TD, quantized_TD = full_TD.float(), quantized_TD.float()
    return (quantized_TD - full_TD).square().sum(-1) / full_TD.square().sum(-1)


def _rows_at_once(vocab_size: int, device: torch.device) -> int:
    rows = max(1, LOGITS_BYTES // (4 * vocab_size))
    return min(rows, CACHED_ROWS) if device.type == "cpu" else rows
