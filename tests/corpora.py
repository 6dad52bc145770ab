"""A corpus of given tokens, with its manifest.

tests.gpu writes its text with it, so it imports nothing that its bundle lacks, such as pytest.
"""

from pathlib import Path
from typing import Any

import numpy as np

from base.files import scratch_directory
from train.data.corpus import commit_corpus, join_pieces
from train.data.manifest import Manifest


def write_corpus(prefix: Path, tokens_T: np.ndarray, lengths_D: np.ndarray, **fields: Any) -> None:
    """PREFIX.bin/.idx of tokens, in their dtype, and of documents of these lengths.

    `fields` are those of the manifest, less what the files say. Token 0 ends documents unless they
    say otherwise.
    """
    with scratch_directory(prefix.with_name(f"{prefix.name}.unfinished")) as directory:
        piece, joined = directory / "piece", directory / "joined"
        tokens_T.tofile(piece)
        joined.mkdir()
        files = join_pieces([(piece, lengths_D)], joined, tokens_T.dtype)
        counts = {"documents": len(lengths_D), "tokens": tokens_T.size}
        defaults: dict[str, Any] = {"eos_token_id": 0, "sources": {}}
        commit_corpus(prefix, joined, Manifest(**(defaults | fields | counts | files)))
