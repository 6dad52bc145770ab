"""The texts of a measurement, and the refusals that keep a number honest.

Shapes: N calibration sequences or evaluated blocks, L tokens of a sequence, T tokens, W tokens of a
    window, U units that intervals resample.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from base.errors import UserError
from base.files import sha256_of
from quant_eval.bos import bos_of
from quant_eval.draws import Draw, packed_draw, separate_draw
from quant_eval.measuring.documents import check_documents
from quant_eval.measuring.losses import EvaluationSet, evaluation_set
from quant_eval.model.streamed import StreamedModel
from quant_eval.quantizer import QuantSpec
from quant_eval.settings import CalibrationSettings, RunSettings
from train.data.corpus import Corpus, check_vocabulary, open_corpus
from train.data.tokenizer import TOKENIZER_JSON

WINDOW_TOKENS = 16
PADDING_RUN = 4  # end-of-text tokens in a row, of which a document has one
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash, modulo 2^64


class Texts(NamedTuple):
    """The calibration draws and the evaluated documents, and how a result describes them."""

    draws: list[Draw]  # none without a calibration text
    data: EvaluationSet
    described: dict[str, Any]

    def draws_for(self, spec: QuantSpec) -> Sequence[Draw | None]:
        """Return the draws a spec is calibrated on, or a single None: it is quantized once."""
        return self.draws if spec.needs_calibration else [None]

    def described_for(self, spec: QuantSpec) -> dict[str, Any]:
        """Return what the result of a spec says of them."""
        unread = {} if spec.needs_calibration else {"calibration": None}
        return self.described | unread


def open_texts(hf_dir: Path, model: StreamedModel, settings: RunSettings) -> Texts:
    """Open and check both texts.

    UserError if they do not fit the model or each other.
    """
    context = model.config.max_position_embeddings
    evaluation = open_text(settings.eval, hf_dir, model.config.vocab_size)
    bos, sha256 = bos_of(hf_dir, settings.bos), evaluation.manifest.sha256
    if settings.calibration is None:
        return _texts(settings, context, None, sha256, bos)
    calibration = open_text(settings.calibration, hf_dir, model.config.vocab_size)
    texts = _texts(settings, context, calibration.manifest.sha256, sha256, bos)
    for draw in texts.draws:
        _check_draw(draw, bos, calibration, model)
    return texts


@functools.lru_cache(maxsize=1)  # for all models of a process
def _texts(
    settings: RunSettings,
    context: int,
    calibration_sha256: str | None,
    eval_sha256: str,
    bos: tuple[int, ...],
) -> Texts:
    """Return the texts with these hashes, in sequences within the context of a model."""
    evaluation, length = open_corpus(settings.eval), settings.block_length(context)
    data = evaluation_set(
        evaluation, length, settings.eval_tokens, settings.documents, settings.eval_seed, bos
    )
    check_documents(evaluation, len(data.documents))
    described = settings.texts(context, calibration_sha256, eval_sha256)
    described["evaluation"]["bos_token_ids"] = list(bos)
    if settings.calibration is None:
        return Texts([], data, described)
    calibration = open_corpus(settings.calibration)
    draws = [
        _draw(calibration, settings, context, settings.seed + draw, bos)
        for draw in range(settings.calibration_seeds)
    ]
    copied = check_apart(calibration, draws, evaluation, data)
    described["calibration"]["share_of_evaluated_windows"] = copied
    return Texts(draws, data, described)


def open_text(prefix: Path, hf_dir: Path, vocab_size: int) -> Corpus:
    """Return a token file.

    UserError if another tokenizer than the model's own made it.
    """
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
    corpus: Corpus,
    settings: CalibrationSettings,
    model: StreamedModel,
    draw: int,
    bos: tuple[int, ...] = (),
) -> Draw:
    """Return draw `draw` (from 0): sequences that begin with `bos`, none twice and none padded."""
    context = model.config.max_position_embeddings
    sequences = _draw(corpus, settings, context, settings.seed + draw, bos)
    _check_draw(sequences, bos, corpus, model)
    return sequences


def _draw(
    corpus: Corpus, settings: CalibrationSettings, context: int, seed: int, bos: tuple[int, ...]
) -> Draw:
    length, count = settings.calibration_length(context), settings.calibration_sequences
    match settings.calibration_documents:
        case "packed":
            return packed_draw(corpus, count, length, seed, bos)
        case "separate":
            return separate_draw(corpus, count, length, seed, bos)
        case kind:
            assert_never(kind)


def _check_draw(draw: Draw, bos: tuple[int, ...], corpus: Corpus, model: StreamedModel) -> None:
    """Raise UserError for padding, or fewer tokens than a linear of the model has inputs."""
    # BOS may be the padding or end-of-text token, and is no padding here.
    texts = [ids_L[len(bos) :].numpy()[None] for ids_L in draw]
    eos = corpus.manifest.eos_token_id
    if any(_is_padded(text_1L, eos, model.config) for text_1L in texts):
        raise UserError(
            f"{corpus.prefix}: calibration sequences hold padding, which would enter the Hessians;"
            " prepare the text without it"
        )
    widths = {name: linear.in_features for name, linear in model.empty_linears().items()}
    # The Hessian of fewer tokens than inputs is singular.
    name, widest = max(widths.items(), key=lambda item: item[1])
    tokens = sum(text_1L.size for text_1L in texts)
    if tokens < widest:
        raise UserError(
            f"{tokens} calibration tokens are too few for the {widest} inputs of {name}:"
            " their Hessian would be decided by the damping; raise --calibration-sequences"
        )


def _is_padded(drawn_NL: NDArray[np.int64], eos: int, config: PretrainedConfig) -> bool:
    """Return whether a sequence holds the padding token, or several ends of text in a row."""
    # Where padding is the end-of-text token, single ones are ends of documents: runs decide then.
    if config.pad_token_id not in (None, eos) and (drawn_NL == config.pad_token_id).any():
        return True
    return bool((_sliding(drawn_NL, PADDING_RUN) == eos).all(-1).any())


def check_apart(
    calibration: Corpus, draws: Sequence[Draw], evaluation: Corpus, data: EvaluationSet
) -> float:
    """Return the share of the evaluated windows of 16 tokens that calibration sequences hold too.

    UserError if most of an evaluated document is in the calibration text, or both are one file.
    """
    if calibration.manifest.sha256 == evaluation.manifest.sha256:
        raise UserError(
            f"{calibration.prefix} and {evaluation.prefix} are the same text; calibrate on text"
            " that is not evaluated"
        )
    # of a calibration sequence every window, of an evaluated block every sixteenth
    sequences = [ids_L.numpy()[None] for draw in draws for ids_L in draw]
    windows = [_hashes(_sliding(ids_1L, WINDOW_TOKENS)) for ids_1L in sequences]
    calibrated = np.unique(np.concatenate([hashes.ravel() for hashes in windows]))
    counts_N = [len(block_T) // WINDOW_TOKENS for block_T in data.blocks]
    cut = [block_T[: len(block_T) // WINDOW_TOKENS * WINDOW_TOKENS] for block_T in data.blocks]
    hashes = _hashes(np.concatenate(cut).reshape(-1, WINDOW_TOKENS))
    if not len(calibrated) or not len(hashes):  # all are shorter than a window
        return 0.0
    # Past the end means larger than all: the last entry, which is not equal, stands for that.
    nearest = np.minimum(np.searchsorted(calibrated, hashes), len(calibrated) - 1)
    is_copied = calibrated[nearest] == hashes

    # the documents most of whose windows are copied
    units = np.repeat(data.owner, counts_N)
    windows_U = np.bincount(units, minlength=len(data.documents))
    copied_U = np.bincount(units, weights=is_copied, minlength=len(data.documents))
    mostly = np.flatnonzero(copied_U * 2 > windows_U)
    if len(mostly):
        raise UserError(
            f"{len(mostly)} evaluated documents of {evaluation.prefix}, the first"
            f" {data.documents[mostly[0]]}, are also in the calibration text {calibration.prefix};"
            " take one of them from another file"
        )
    return float(is_copied.mean())


def _sliding(tokens_NL: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return every window of `width` tokens, [N, windows, W].

    A shorter sequence has none.
    """
    if tokens_NL.shape[1] < width:
        return np.empty((len(tokens_NL), 0, width), np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens_NL, width, axis=1)


def _hashes(windows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of each window of W tokens, [..., W] -> [...]."""
    hashes = np.zeros(windows.shape[:-1], np.uint64)
    for tokens in np.moveaxis(windows, -1, 0):
        # Arrays of unsigned integers wrap without a warning, which is the modulus.
        hashes = hashes * MULTIPLIER + tokens.astype(np.uint64) + np.uint64(1)
    return hashes
