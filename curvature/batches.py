"""Sequences of a measurement: a function of text and seed, the same for every model and any ranks.

Shapes: B sequences, S positions of a sequence.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from base.errors import UserError
from train.data.batches import batch
from train.data.corpus import check_vocabulary, open_corpus


class Batches:
    """Packed sequences of a token file in the order of a seed, none of which comes twice.

    Args:
        prefix: of the token files.
        config: of the model.
        sequence_length: S; None is the model's context.
        seed: of the order of the sequences.
        needed: sequences that will be read.

    Attributes:
        sequence_length: S.
        described: the text, as results name it.

    Raises:
        UserError: the text is of another vocabulary or too short, or the sequences are too long for
            the model.
    """

    def __init__(
        self,
        prefix: Path,
        config: PretrainedConfig,
        *,
        sequence_length: int | None,
        seed: int,
        needed: int,
    ) -> None:
        self._corpus, self._seed = open_corpus(prefix, verify_hashes=True), seed
        check_vocabulary(self._corpus, config.vocab_size)
        self.sequence_length = length = checked_length(config, sequence_length)
        available = self._corpus.num_sequences(length)
        if needed > available:
            raise UserError(
                f"{prefix} holds {available} sequences of {length} tokens, {needed} are needed;"
                " give more text, or ask for fewer or shorter sequences"
            )
        self.described: dict[str, Any] = {
            "prefix": str(prefix),
            "bin_sha256": self._corpus.manifest.sha256,
            "sequence_length": length,
        }

    def number(self, index: int, size: int) -> Tensor:
        """Return batch `index` of the order, cut into batches of `size`, int64 [B, S + 1]."""
        tokens_BS1 = batch(
            self._corpus,
            step=index + 1,
            batch_size=size,
            sequence_length=self.sequence_length,
            seed=self._seed,
        )
        return torch.from_numpy(tokens_BS1)


def checked_length(config: PretrainedConfig, sequence_length: int | None) -> int:
    """Return the tokens of a sequence, by default the context.

    UserError if they are more than the context.
    """
    context: int = config.max_position_embeddings
    if sequence_length and sequence_length > context:
        raise UserError(
            f"--sequence-length {sequence_length} is beyond the model's context {context};"
            " shorten it"
        )
    return sequence_length or context
