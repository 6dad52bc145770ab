"""What a model is calibrated and evaluated on, and the refusals that keep a number honest.

Shapes: N calibration sequences, L tokens of a sequence, T tokens, W tokens of a window.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from quant_eval.losses import EvaluationSet
from quant_eval.settings import BLOCK_TOKENS, CalibrationSettings
from train.command import UserError
from train.corpus import Corpus, check_vocabulary, open_corpus
from train.data import batch
from train.run_directory import sha256_of
from train.tokenizer import TOKENIZER_JSON

WINDOW_TOKENS = 16
PADDING_RUN = 4  # end-of-text tokens in a row, of which a document has one
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash, modulo 2^64


def open_text(prefix: Path, hf_dir: Path, vocab_size: int) -> Corpus:
    """A token file for the model; UserError if another tokenizer made it, where the model has one beside it."""
    corpus = open_corpus(prefix, verify_hashes=True)
    check_vocabulary(corpus, vocab_size)
    tokenizer = hf_dir / TOKENIZER_JSON
    if tokenizer.exists() and sha256_of(tokenizer) != corpus.manifest.tokenizer_sha256:
        raise UserError(
            f"{prefix} was made with another tokenizer than {tokenizer}; prepare the text again with "
            f"'python -m train prepare --tokenizer {hf_dir}'"
        )
    return corpus


def block_length(asked: int | None, config: PretrainedConfig) -> int:
    """Tokens the model sees at once: as asked, or 2048, or its context if that is less."""
    context = int(config.max_position_embeddings)
    if asked is not None and asked > context:
        raise UserError(f"--sequence-length {asked} is longer than the model's context of {context}; shorten it")
    return asked or min(BLOCK_TOKENS, context)


def calibration_draw(
    corpus: Corpus, settings: CalibrationSettings, length: int, draw: int, config: PretrainedConfig
) -> Tensor:
    """Draw `draw` (from 0), int64 [N, L]: packed sequences of the file, none twice and none padded."""
    available = corpus.num_sequences(length)
    if settings.sequences > available:
        raise UserError(
            f"{corpus.prefix} holds {available} sequences of {length} tokens, fewer than {settings.sequences}; lower "
            f"--calibration-sequences or prepare more text"
        )
    drawn = batch(corpus, step=1, batch_size=settings.sequences, sequence_length=length, seed=settings.seed + draw)[
        :, :-1
    ].copy()
    eos, pad = corpus.manifest.eos_token_id, config.pad_token_id
    is_pad = (drawn == pad).any() if pad not in (None, eos) else False
    fill = drawn == eos
    is_filled = (
        length >= PADDING_RUN
        and np.logical_and.reduce(
            [fill[:, start : length - PADDING_RUN + 1 + start] for start in range(PADDING_RUN)]
        ).any()
    )
    if is_pad or is_filled:
        raise UserError(
            f"{corpus.prefix}: calibration sequences hold padding, which would enter the Hessians; prepare the "
            f"text without it"
        )
    return torch.from_numpy(drawn)


def check_tokens(calibration_NL: Tensor, features: dict[str, int]) -> None:
    """UserError if there are fewer calibration tokens than a linear has inputs: its Hessian would be singular."""
    name, widest = max(features.items(), key=lambda item: item[1])
    if calibration_NL.numel() < widest:
        raise UserError(
            f"{calibration_NL.numel()} calibration tokens are too few for the {widest} inputs of {name}: their Hessian "
            f"would be decided by the damping; raise --calibration-sequences"
        )


def check_apart(calibration: Corpus, draws: list[Tensor], evaluation: Corpus, data: EvaluationSet) -> float:
    """Share of the evaluated text's windows of 16 tokens that the calibration sequences hold too.

    Raises:
        UserError: an evaluated document lies mostly in the calibration text, or both are the same file.
    """
    if calibration.manifest.sha256 == evaluation.manifest.sha256:
        raise UserError(
            f"{calibration.prefix} and {evaluation.prefix} are the same text; calibrate on text that is not evaluated"
        )
    seen = [_hashes(row_L, np.arange(len(row_L) - WINDOW_TOKENS + 1)) for draw in draws for row_L in draw.numpy()]
    known = np.unique(np.concatenate(seen)) if seen else np.empty(0, np.uint64)
    per_unit = np.zeros((len(data.documents), 2), np.int64)
    for block_T, unit in zip(data.blocks, data.owner, strict=True):
        found = np.isin(_hashes(block_T, np.arange(0, len(block_T) - WINDOW_TOKENS + 1, WINDOW_TOKENS)), known)
        per_unit[unit] += (len(found), int(found.sum()))
    windows, copied = per_unit.sum(0).tolist()
    mostly = np.flatnonzero(per_unit[:, 1] * 2 > per_unit[:, 0])
    if len(mostly):
        raise UserError(
            f"{len(mostly)} evaluated documents of {evaluation.prefix}, the first {data.documents[mostly[0]]}, are "
            f"also in the calibration text {calibration.prefix}; take one of them from another file"
        )
    return float(copied / max(1, windows))


def _hashes(tokens_T: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of the window at each start."""
    hashes: NDArray[np.uint64] = np.zeros(len(starts), np.uint64)
    tokens = tokens_T.astype(np.uint64)
    for place in range(WINDOW_TOKENS):
        hashes = hashes * MULTIPLIER + tokens[starts + place] + np.uint64(1)
    return hashes


def describe(corpus: Corpus) -> dict[str, Any]:
    """What a result says of a text."""
    return {"prefix": str(corpus.prefix), "sha256": corpus.manifest.sha256}
