"""The texts of a measurement, and the refusals that keep a number honest.

Shapes: N calibration sequences, L tokens of a sequence, T tokens, W tokens of a window.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from base.errors import UserError
from base.files import sha256_of
from quant_eval.measuring.losses import EvaluationSet, evaluation_set
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import CalibrationSettings, RunSettings
from train.data.batches import batch
from train.data.corpus import Corpus, check_vocabulary, open_corpus
from train.data.tokenizer import TOKENIZER_JSON

WINDOW_TOKENS = 16
PADDING_RUN = 4  # end-of-text tokens in a row, of which a document has one
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash, modulo 2^64


class Texts(NamedTuple):
    """The calibration draws and the evaluated documents, and how a result describes them."""

    draws: list[Tensor]
    data: EvaluationSet
    described: dict[str, dict[str, Any]]


def open_texts(hf_dir: Path, model: StreamedModel, settings: RunSettings) -> Texts:
    """Open and check both texts; UserError if they do not fit the model or each other."""
    calibration, evaluation = (
        open_text(prefix, hf_dir, model.config.vocab_size)
        for prefix in (settings.calibration, settings.eval)
    )
    length = settings.block_length(model.config.max_position_embeddings)
    draws = [
        calibration_draw(calibration, settings, model, draw)
        for draw in range(settings.calibration_seeds)
    ]
    data = evaluation_set(
        evaluation, length, settings.eval_tokens, settings.documents, settings.eval_seed
    )
    copied = check_apart(calibration, draws, evaluation, data)
    sha256 = (calibration.manifest.sha256, evaluation.manifest.sha256)
    described = settings.texts(length, *sha256)
    described["evaluation"]["windows_in_calibration"] = copied
    return Texts(draws, data, described)


def open_text(prefix: Path, hf_dir: Path, vocab_size: int) -> Corpus:
    """Return a token file; UserError if another tokenizer than the model's own made it."""
    corpus = open_corpus(prefix, verify_hashes=True)
    check_vocabulary(corpus, vocab_size)
    tokenizer = hf_dir / TOKENIZER_JSON
    if tokenizer.exists() and sha256_of(tokenizer) != corpus.manifest.tokenizer_sha256:
        raise UserError(
            f"{prefix} was made with another tokenizer than {tokenizer}; prepare the text again"
            f" with 'python -m train prepare --tokenizer {hf_dir}'"
        )
    return corpus


def calibration_draw(
    corpus: Corpus, settings: CalibrationSettings, model: StreamedModel, draw: int
) -> Tensor:
    """Return draw `draw` (from 0), int64 [N, L]: packed sequences, none twice and none padded."""
    length = settings.block_length(model.config.max_position_embeddings)
    sequences, available = settings.calibration_sequences, corpus.num_sequences(length)
    if sequences > available:
        raise UserError(
            f"{corpus.prefix} holds {available} sequences of {length} tokens, fewer than"
            f" {sequences}; lower --calibration-sequences or prepare more text"
        )
    drawn = batch(
        corpus,
        step=1,
        batch_size=sequences,
        sequence_length=length,
        seed=settings.seed + draw,
    )[:, :-1].copy()
    if _is_padded(drawn, corpus.manifest.eos_token_id, model.config):
        raise UserError(
            f"{corpus.prefix}: calibration sequences hold padding, which would enter the Hessians;"
            " prepare the text without it"
        )
    widths = {name: linear.in_features for name, linear in model.empty_linears().items()}
    name, widest = max(widths.items(), key=lambda item: item[1])
    if drawn.size < widest:
        raise UserError(
            f"{drawn.size} calibration tokens are too few for the {widest} inputs of {name}: their"
            " Hessian would be decided by the damping; raise --calibration-sequences"
        )
    return torch.from_numpy(drawn)


def _is_padded(drawn_NL: NDArray[np.int64], eos: int, config: PretrainedConfig) -> bool:
    """Return whether a sequence holds the padding token, or several ends of text in a row."""
    if config.pad_token_id not in (None, eos) and (drawn_NL == config.pad_token_id).any():
        return True
    ends_NW = np.lib.stride_tricks.sliding_window_view(
        drawn_NL == eos, min(PADDING_RUN, drawn_NL.shape[1]), axis=1
    )
    return drawn_NL.shape[1] >= PADDING_RUN and bool(ends_NW.all(-1).any())


def check_apart(
    calibration: Corpus, draws: list[Tensor], evaluation: Corpus, data: EvaluationSet
) -> float:
    """Return the share of the evaluated windows of 16 tokens that calibration sequences hold too.

    UserError if most of an evaluated document is in the calibration text, or both are one file.
    """
    if calibration.manifest.sha256 == evaluation.manifest.sha256:
        raise UserError(
            f"{calibration.prefix} and {evaluation.prefix} are the same text; calibrate on text"
            " that is not evaluated"
        )
    seen = [
        _hashes(row_L, np.arange(len(row_L) - WINDOW_TOKENS + 1))
        for draw in draws
        for row_L in draw.numpy()
    ]
    known = np.unique(np.concatenate(seen))
    if not len(known):  # sequences shorter than a window
        return 0.0
    per_unit = np.zeros((len(data.documents), 2), np.int64)
    for block_T, unit in zip(data.blocks, data.owner, strict=True):
        starts = np.arange(0, len(block_T) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
        hashes = _hashes(block_T, starts)
        nearest = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)]
        per_unit[unit] += (len(hashes), int((nearest == hashes).sum()))
    windows, copied = per_unit.sum(0).tolist()
    mostly = np.flatnonzero(per_unit[:, 1] * 2 > per_unit[:, 0])
    if len(mostly):
        raise UserError(
            f"{len(mostly)} evaluated documents of {evaluation.prefix}, the first"
            f" {data.documents[mostly[0]]}, are also in the calibration text {calibration.prefix};"
            " take one of them from another file"
        )
    return float(copied / max(1, windows))


def _hashes(tokens_T: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of the window at each start."""
    hashes: NDArray[np.uint64] = np.zeros(len(starts), np.uint64)
    tokens = tokens_T.astype(np.uint64)
    for place in range(WINDOW_TOKENS):
        hashes = hashes * MULTIPLIER + tokens[starts + place] + np.uint64(1)
    return hashes
