"""Which sequences a measurement is made on: a function of text and seed, the same for every model and any ranks.

Shapes: B sequences, S positions of a sequence.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from train.command import UserError
from train.corpus import check_vocabulary, open_corpus
from train.data import batch


class Batches:
    """Packed sequences of a token file in the order of a seed; none comes twice.

    Attributes:
        sequence_length: S.
        described: what a result says of the text.
    """

    def __init__(
        self,
        prefix: Path,
        config: PretrainedConfig,
        *,
        sequence_length: int | None,
        seed: int,
        needed: int,
        option: str | None = None,
    ) -> None:
        """`needed` sequences of `sequence_length` tokens, the model's context if that is None.

        `option` of the command line is named in the refusal if it alone decides how many are needed.

        Raises:
            UserError: the text is of another vocabulary or too short, or the sequences are too long for the model.
        """
        self._corpus, self._seed = open_corpus(prefix, verify_hashes=True), seed
        check_vocabulary(self._corpus, config.vocab_size)
        context: int = config.max_position_embeddings
        self.sequence_length = sequence_length or context
        if self.sequence_length > context:
            raise UserError(
                f"--sequence-length {self.sequence_length} is beyond the model's context {context}; shorten it"
            )
        available = self._corpus.num_sequences(self.sequence_length)
        if needed > available:
            asked = f"{option} asks for {needed}" if option else f"{needed} are needed"
            raise UserError(
                f"{prefix} holds {available} sequences of {self.sequence_length} tokens, {asked}; give "
                f"more text, ask for less, or shorten --sequence-length"
            )
        self.described: dict[str, Any] = {
            "prefix": str(prefix),
            "bin_sha256": self._corpus.manifest.bin.sha256,
            "sequence_length": self.sequence_length,
        }

    def number(self, index: int, size: int) -> Tensor:
        """Batch `index` (from 0) of the order cut into batches of `size` sequences, int64 [B, S + 1]."""
        length = self.sequence_length
        return torch.from_numpy(
            batch(self._corpus, step=index + 1, batch_size=size, sequence_length=length, seed=self._seed)
        )
