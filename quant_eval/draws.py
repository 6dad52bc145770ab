"""The calibration draws: the sequences that Hessians are estimated on, of one length or of many.

`measuring.texts` makes and checks them. `measuring.walk` and the libraries (`libraries.job`) read
them, in batches without padding: what is padded would enter the Hessians.

Shapes: N sequences, L tokens of a sequence, B sequences of a batch, T tokens of all.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from base.errors import UserError
from quant_eval.bos import begun
from train.data.batches import batch
from train.data.corpus import Corpus

Draw = Tensor | Sequence[Tensor]  # int64 [N, L], or N sequences [L] of different lengths
DROPPED_TOKENS = 10  # gptqmodel always leaves out sequences of up to so many tokens


def packed_draw(corpus: Corpus, sequences: int, length: int, seed: int, bos: Sequence[int]) -> Draw:
    """Return sequences of one length drawn at random, none twice, of documents that are joined.

    Each begins with `bos`, which takes the place of its last token. UserError for a file of fewer.
    """
    available = corpus.num_sequences(length)
    if sequences > available:
        raise UserError(
            f"{corpus.prefix} holds {available} sequences of {length} tokens, fewer than"
            f" {sequences}; lower --calibration-sequences or prepare more text"
        )
    tokens_BS1 = batch(corpus, step=1, batch_size=sequences, sequence_length=length, seed=seed)
    # `batch` gives inputs and targets: the last token of a sequence is a target alone.
    draw_NL = np.stack([begun(sequence, bos)[:length] for sequence in tokens_BS1[:, :-1]])
    return torch.from_numpy(draw_NL)


def separate_draw(
    corpus: Corpus, documents: int, length: int, seed: int, bos: Sequence[int]
) -> Draw:
    """Return documents in the order of the file, each a sequence of its own after `bos`.

    Draw 0 has the first of the file, as arXiv:2510.06213 has them, and each further draw those that
    come next. A document is without its end-of-text token and ends at `length` tokens; one of up
    to 10 is left out, as gptqmodel leaves it out. UserError for a file of fewer.
    """
    check_documents_for(corpus, documents, draws=seed + 1)
    first, eos = seed * documents, corpus.manifest.eos_token_id
    texts = [corpus.document(index) for index in range(first, first + documents)]
    ids = [begun(text_T[text_T != eos], bos)[:length] for text_T in texts]
    return [torch.from_numpy(ids_L) for ids_L in ids if len(ids_L) > DROPPED_TOKENS]


def check_documents_for(corpus: Corpus, documents: int, draws: int) -> None:
    """Raise UserError where a file has fewer documents than so many draws take."""
    available = len(corpus.lengths_D)
    if documents * draws > available:
        raise UserError(
            f"{corpus.prefix} holds {available} documents, fewer than {draws} x {documents} for"
            " calibration; lower --calibration-sequences or prepare more text"
        )


def batches_of(draw: Draw, size: int) -> list[Tensor]:
    """Return neighbours of one length in batches [B, L] of up to `size`, so that none is padded.

    >>> [len(batch) for batch in batches_of([torch.arange(n) for n in (7, 7, 7, 5, 7)], 2)]
    [2, 1, 1, 1]
    """
    batches = []
    for _, group in groupby(draw, key=len):
        sequences = list(group)
        batches += [
            torch.stack(sequences[start : start + size]) for start in range(0, len(sequences), size)
        ]
    return batches


def is_ragged(draw: Draw) -> bool:
    """Return whether sequences differ in length."""
    return len({len(ids_L) for ids_L in draw}) > 1


def save_draw(path: Path, draw: Draw) -> None:
    """Write all tokens of a draw [T] and the length of each sequence, for a library's process."""
    lengths = torch.tensor([len(ids_L) for ids_L in draw])
    save_file({"input_ids": torch.cat(list(draw)), "lengths": lengths}, path)


def load_draw(path: Path) -> Draw:
    """Return a draw that `save_draw` wrote."""
    tensors = load_file(path)
    return torch.split(tensors["input_ids"], tensors["lengths"].tolist())


def described_draw(draw: Draw) -> dict[str, int]:
    """Return the size of a draw, for the report of a library."""
    return {"sequences": len(draw), "tokens": sum(map(len, draw))}
