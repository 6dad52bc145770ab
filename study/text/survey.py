"""The amount of text that there is and that a study reads, and the shares that follow.

Called by `study.text.own` before anything is started.
"""

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError
from base.progress import Progress
from base.statistics import LEAST_DOCUMENTS
from curvature.settings import LineSettings, PlaneSettings
from quant_eval.settings import BLOCK_TOKENS
from study.definition import Study
from train.data.corpus import open_corpus
from train.data.documents import read_documents
from train.data.manifest import HASHED_AT_START_BYTES, PLACES, Share, place_of
from train.data.prepare import token_bytes
from train.data.tokenizer import load_tokenizer

CALIBRATION_DRAWS = 4  # of the calibration text: a draw of all of it would be the only one
LOSS_DOCUMENTS = 50  # at least, of each loss: intervals cover what they say from there on
MARGIN = 1.25  # of what is held out, as long as its tokens are an estimate by the tokenizer
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 2_000, 2_000

# Bytes of a token of a byte-level BPE that is yet to be trained: fewer than prose and code have, so
# that text is refused only where it is too little; `prepare --at-least` counts afterwards. What is
# held out has to suffice all the same where a token has twice as many.
LARGE_VOCABULARY = 16_384
BYTES_PER_TOKEN = {"small": 2.0, "large": 3.0}
MARGIN_UNTRAINED = 2.0


class TextNeeds(NamedTuple):
    """The tokens that a study reads: of training text by its longest run, to measure, to calibrate.

    Of a held-out document at most `document_tokens` count, so that a loss is over many documents.
    """

    train: int
    held_out: int
    calibration: int
    document_tokens: int


class TextSurvey(NamedTuple):
    """A text by documents, D of them.

    Attributes:
        places_D: of a million, decided by the content.
        tokens_D: of each document, end of text included; an estimate where it is not tokenized.
        margin: what an estimate is multiplied by to be safe.
    """

    places_D: NDArray[np.int64]
    tokens_D: NDArray[np.float64]
    margin: float


def needs_of(study: Study) -> TextNeeds:
    """Return the tokens that the runs and measurements of a study read."""
    quantization, curvature = study.quantization, study.curvature
    length = max((run.data.sequence_length for run in study.trained), default=BLOCK_TOKENS)
    sequences = max((run.data.held_out_sequences for run in study.trained), default=0)
    if curvature:
        microbatches = max(curvature.pairs, curvature.norm_pairs, curvature.companion_pairs)
        products = microbatches * curvature.microbatch_sequences
        sequences = max(sequences, products, curvature.fixed_sequences)
    if quantization.by_block:
        products = study.step.microbatches * study.step.microbatch_sequences
        sequences = max(sequences, products)
    for settings in study.measured_by.values():
        if isinstance(settings, PlaneSettings | LineSettings):
            sequences = max(sequences, settings.sequences)
    losses = max(quantization.eval_tokens, quantization.block_tokens)
    return TextNeeds(
        # One more token than is read as input: each token predicts the next one.
        train=max((run.total_tokens for run in study.trained), default=0) + 1,
        held_out=max(losses + LOSS_DOCUMENTS, sequences * length + 1),
        calibration=quantization.calibration_sequences * min(length, BLOCK_TOKENS) + 1,
        # So few of each document that both kinds of loss are over enough documents.
        document_tokens=max(
            2,
            min(
                quantization.eval_tokens // LOSS_DOCUMENTS,
                quantization.block_tokens // LEAST_DOCUMENTS,
            ),
        ),
    )


def survey_files(
    paths: Sequence[Path], key: str, tokenizer: Path | None, vocab_size: int
) -> TextSurvey:
    """Read every document once; UserError for a file without text, or that is damaged."""
    places, sizes = array("l"), array("q")
    sample: list[str] = []
    is_large = sum(path.stat().st_size for path in paths) > HASHED_AT_START_BYTES
    # of a small text a refusal is to be the only line
    with Progress("survey", len(paths)) if is_large else nullcontext() as progress:
        for path in paths:
            before = len(places)
            for text in read_documents(path, key):
                content = text.encode()
                places.append(place_of(content))
                sizes.append(len(content))
                if len(sample) < SAMPLE_DOCUMENTS:
                    # The beginning of each document is enough to count bytes per token.
                    sample.append(text[:SAMPLE_CHARACTERS])
            if len(places) == before:
                raise UserError(f"{path} holds no document; leave it out")
            if progress:
                progress.advance()
    if tokenizer:
        margin, encode = MARGIN, load_tokenizer(tokenizer)[0].encode_batch_fast
        tokens = sum(len(encoding.ids) for encoding in encode(sample, add_special_tokens=False))
        # An estimate from the first documents; the margin covers what the rest differs by.
        per_token = sum(len(text.encode()) for text in sample) / max(tokens, 1) or 1.0
    else:
        # The vocabulary is not trained yet, so bytes per token are a guess with a wide margin.
        margin = MARGIN_UNTRAINED
        per_token = BYTES_PER_TOKEN["large" if vocab_size >= LARGE_VOCABULARY else "small"]
    return TextSurvey(np.array(places, np.int64), np.array(sizes, np.int64) / per_token + 1, margin)


def survey_tokens(prefix: Path, tokenizer_sha256: str) -> TextSurvey:
    """Read every document of a token file once; UserError where another tokenizer made it."""
    # Token files are exact: their margin below is 1.
    corpus = open_corpus(prefix)
    if corpus.manifest.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(
            f"{prefix} was not made by the tokenizer in --tokenizer; name the one that made it"
        )
    documents = range(corpus.manifest.documents)
    places = (place_of(token_bytes(corpus.document(index))) for index in documents)
    return TextSurvey(np.fromiter(places, np.int64), corpus.lengths_D.astype(np.float64), 1.0)


def shares_of(survey: TextSurvey, needs: TextNeeds, name: str) -> dict[str, Share]:
    """Return the shares by use: as many documents as have to be held out, the rest to train on.

    Raises:
        UserError: too few documents or tokens; `name` is what the message calls the text.
    """
    # held-out documents come first in the order of places, then those to calibrate with
    order = np.argsort(survey.places_D, kind="stable")
    places, tokens = survey.places_D[order], survey.tokens_D[order]
    total, at = f"{name} holds {len(places):,} documents of about {tokens.sum():,.0f} tokens", 0
    shares: dict[str, Share] = {}
    for use, wanted, most in (
        ("held_out", needs.held_out, needs.document_tokens),
        ("calibration", CALIBRATION_DRAWS * needs.calibration, None),
    ):
        # Of a held-out document at most `most` tokens count, as many as losses take of it.
        counted = np.cumsum(tokens[at:] if most is None else np.minimum(tokens[at:], most))
        enough = int(np.searchsorted(counted, wanted * survey.margin))
        if enough >= len(counted):
            purpose = f"to measure on, at most {most:,} of a document," if most else "to calibrate"
            raise UserError(
                f"{total}, too few to keep {wanted:,} tokens {purpose} apart; give more text, or"
                " the same in more documents: a .jsonl has one per line, any other text file is one"
            )
        # Shares join without a gap: each place belongs to one use alone.
        first, stop = (shares["held_out"].stop if shares else 0), int(places[at + enough]) + 1
        shares[use] = Share(first=first, stop=stop)
        # Documents of equal content have one place and stay on one side of the cut.
        at = int(np.searchsorted(places, stop))

    # the rest is to train on
    left = float(tokens[at:].sum())
    if needs.train > 1:
        if left < needs.train:
            raise UserError(
                f"{total}, of which {left:,.0f} are left to train on, and a run reads"
                f" {needs.train:,}; give more text, or take a smaller recipe"
            )
        shares["train"] = Share(first=shares["calibration"].stop, stop=PLACES)
    return shares
