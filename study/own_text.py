"""The text that --text names: which of four kinds it is, its identity, and what a study takes of it.

Files of text and a token file are shared out by document: a share to train on, one to measure on,
one to calibrate with (`study.survey` says how large). Token files that are parted already, and those
of another study, are read in place. `study.text_steps` holds the commands that make the rest.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from study.settings import Study, load_study
from study.text import OwnText, TokenFiles
from study.text_places import places_of
from train.command import UserError
from train.manifest import HASHED_AT_START_BYTES, Manifest, read_manifest
from train.run_directory import sha256_of
from train.tokenizer import TOKENIZER_JSON, load_tokenizer

SAMPLED_BLOCKS, BLOCK_BYTES = 256, 1 << 20  # of files too large to be hashed at every start
HASH_CHARACTERS = 8  # of the identity, in the study's name
LABEL_CHARACTERS = 40
FORMS = "FILES of text, PREFIX of a token file, TRAIN HELD_OUT CALIBRATION prefixes, or the directory of a study"

Kind = Literal["files", "prefix", "prefixes", "study"]


class Asked(NamedTuple):
    """The options --text and --tokenizer."""

    paths: tuple[Path, ...]
    tokenizer: Path | None = None


class Given(NamedTuple):
    """The text that the options name, found to be there.

    Attributes:
        kind: files of text, one token file, token files by use, or those of a study.
        places: absolute.
        tokenizer: directory; None: one is trained.
        sha256: of the contents and the tokenizer.
        label: what the study's name says of it.
    """

    kind: Kind
    places: tuple[Path, ...]
    tokenizer: Path | None
    sha256: str
    label: str

    @property
    def suffix(self) -> str:
        """The suffix of a study's name."""
        return f"-text={self.label}.{self.sha256[:HASH_CHARACTERS]}"


def given_of(asked: Asked) -> Given:
    """Return what the options name; UserError for what is missing, empty or of no known kind."""
    places = tuple(path.absolute() for path in asked.paths)
    for place in places:
        if places.count(place) > 1:
            raise UserError(f"{place} is given twice to --text; give every place once")
    tokenizer = asked.tokenizer.absolute() if asked.tokenizer else None
    kind = _kind(places)
    if kind == "study":
        places, tokenizer = _of_study(places[0], tokenizer)
    if tokenizer:
        load_tokenizer(tokenizer)
    elif kind in ("prefix", "prefixes"):
        raise UserError(f"{places[0]} does not say which tokenizer made it; name its directory with --tokenizer")
    sha256 = _identity(kind, places, tokenizer)
    first = asked.paths[0].absolute().name
    label = first.partition(".")[0] if kind == "files" else first
    more = f"+{len(places) - 1}" if kind == "files" and len(places) > 1 else ""
    return Given(kind, places, tokenizer, sha256, _fit_for_a_name(label) + more)


def _fit_for_a_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_=+-]+", "-", label)[:LABEL_CHARACTERS]


def _kind(places: Sequence[Path]) -> Kind:
    kinds = {_kind_of(place) for place in places}
    if len(kinds) > 1:
        raise UserError(f"--text names places of several kinds; give {FORMS}")
    kind, count = kinds.pop(), len(places)
    if kind == "study" and count > 1:
        raise UserError(f"--text names {count} studies; give one")
    if kind == "prefix" and count > 3:
        raise UserError(f"--text names {count} token files; give one, or TRAIN HELD_OUT CALIBRATION")
    return "prefixes" if kind == "prefix" and count > 1 else kind


def _kind_of(place: Path) -> Kind:
    if place.is_dir():
        if (place / "study.json").is_file():
            return "study"
        raise UserError(f"{place} is a directory without a study; --text takes {FORMS}")
    if place.exists():
        if place.is_file() and place.stat().st_size:
            return "files"
        raise UserError(f"{place} is empty or no regular file; --text takes {FORMS}")
    if Path(f"{place}.json").is_file():
        return "prefix"
    raise UserError(f"{place} does not exist; --text takes {FORMS}")


def _of_study(directory: Path, tokenizer: Path | None) -> tuple[tuple[Path, ...], Path]:
    """Return the token files of a study that has them, and its tokenizer."""
    if tokenizer:
        raise UserError(f"{directory} is a study and has its tokenizer; leave --tokenizer out")
    roots = {"{study}": directory, "{root}": directory.parent}
    found = {}
    for use, place in places_of(load_study(directory).text).items():
        root, _, rest = place.partition("/")
        found[use] = roots[root] / rest if root in roots else Path(place)
    for use in ("train", "held_out", "calibration"):
        if use in found and not Path(f"{found[use]}.json").is_file():
            raise UserError(
                f"{found[use]}.json does not exist; run 'python -m study run {directory.name} --root "
                f"{directory.parent}' first, which makes that text, or give another"
            )
    uses = [found[use] for use in ("train", "held_out", "calibration") if use in found]
    return tuple(uses), found["tokenizer"]


def _identity(kind: str, places: Sequence[Path], tokenizer: Path | None) -> str:
    """Return the SHA-256 of what is in the places, in order, and of the tokenizer.

    Files that are together above 256 MiB are known by their sizes and by blocks spread over them.
    """
    digest = hashlib.sha256(sha256_of(tokenizer / TOKENIZER_JSON).encode() if tokenizer else b"trained")
    if kind != "files":
        from train.corpus import open_source

        for place in places:
            digest.update(open_source(place, verify_hashes=True).manifest.sha256.encode())
        return digest.hexdigest()
    sizes = [place.stat().st_size for place in places]
    whole = sum(sizes) <= HASHED_AT_START_BYTES
    for place, size in zip(places, sizes, strict=True):
        digest.update(f"{size}:".encode())
        digest.update(sha256_of(place).encode() if whole else _sampled(place, size, len(places)))
    return digest.hexdigest()


def _sampled(place: Path, size: int, files: int) -> bytes:
    """Return a hash of blocks spread evenly over a file, its first and its last ones among them."""
    digest, count = hashlib.sha256(), max(2, SAMPLED_BLOCKS // files)
    with place.open("rb") as file:
        for number in range(count):
            file.seek(max(0, size - BLOCK_BYTES) * number // (count - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.digest()


def check_unchanged(text: OwnText) -> None:
    """UserError where what a text is made of is gone or changed since the study was started."""
    asked = Asked(tuple(map(Path, text.sources)), Path(text.tokenizer) if text.tokenizer else None)
    if given_of(asked).sha256 != text.sha256:
        raise UserError(
            f"{text.sources[0]}{' or another file' if len(text.sources) > 1 else ''} was changed since the study was "
            "started with it; restore it, or start another study with --text"
        )


def text_of(study: Study, given: Given) -> OwnText | TokenFiles:
    """Return what a study takes of a text.

    Raises:
        UserError: too little text or too few documents, another tokenizer or vocabulary.
    """
    from study.survey import needs_of, shares_of, survey_files, survey_tokens  # numpy and pyarrow

    vocab_size = min((run.model.vocab_size for run in study.trained), default=None)
    if given.tokenizer:
        _check_vocabulary(study, given.tokenizer, vocab_size)
    if given.kind in ("prefixes", "study"):
        return _in_place(study, given)
    needs = needs_of(study)
    if given.kind == "prefix":
        assert given.tokenizer
        _check_made_by(given.places[0], given.tokenizer)
        found = survey_tokens(given.places[0])
    elif given.tokenizer is None and vocab_size is None:
        raise UserError(f"{study.name} trains nothing, its models have their tokenizer; name it with --tokenizer")
    else:
        found = survey_files(given.places, given.tokenizer, vocab_size)
    shares = shares_of(found, needs, ", ".join(path.name for path in given.places[:3]))
    return OwnText(
        sources=tuple(map(str, given.places)),
        sha256=given.sha256,
        tokenizer=str(given.tokenizer) if given.tokenizer else None,
        vocab_size=vocab_size or load_tokenizer(given.tokenizer)[0].get_vocab_size(),  # type: ignore[arg-type]
        train=shares["train"] if study.trained else None,
        train_tokens=needs.train,
        held_out=shares["held_out"],
        held_out_tokens=needs.held_out,
        document_tokens=needs.document_tokens,
        calibration=shares["calibration"],
        calibration_tokens=needs.calibration,
    )


def _check_vocabulary(study: Study, tokenizer: Path, rows: int | None) -> None:
    size = load_tokenizer(tokenizer)[0].get_vocab_size()
    if rows is not None and size > rows:
        padded = -(-size // 128) * 128
        raise UserError(
            f"{tokenizer} has {size:,} tokens, the models of {study.name} have rows for {rows:,}; give another "
            f"--tokenizer, or --set model.vocab_size={padded}"
        )


def _check_made_by(prefix: Path, tokenizer: Path) -> None:
    if read_manifest(prefix).tokenizer_sha256 != sha256_of(tokenizer / TOKENIZER_JSON):
        raise UserError(f"{prefix} was not made by the tokenizer in {tokenizer}; name the one that made it")


def _in_place(study: Study, given: Given) -> TokenFiles:
    """Return token files by use, checked for their length."""
    from study.survey import needs_of

    assert given.tokenizer
    places, needs = list(given.places), needs_of(study)
    train = places.pop(0) if len(places) == 3 else None
    if study.trained and train is None:
        raise UserError(f"{study.name} trains on text, --text names none for it; give TRAIN HELD_OUT CALIBRATION")
    held_out, calibration = places
    for place, tokens in (
        (held_out, needs.held_out),
        (calibration, needs.calibration),
        *([(train, needs.train)] if study.trained and train else []),
    ):
        _check_made_by(place, given.tokenizer)
        manifest = read_manifest(place)
        if study.trained and manifest.tokens < tokens:  # the context of released models is not known yet
            raise UserError(
                f"{place} holds {manifest.tokens:,} tokens, {study.name} reads {tokens:,} of it; give more text"
            )
        if place != train and not isinstance(manifest, Manifest):
            raise UserError(f"{place} lists OLMo's token files, which are for training; give text of 'train prepare'")
    return TokenFiles(
        train=str(train) if study.trained and train else None,
        held_out=str(held_out),
        calibration=str(calibration),
        tokenizer=str(given.tokenizer),
        sha256=given.sha256,
    )
