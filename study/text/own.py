"""The text that --text names: its kind, its identity, and what a study takes of it.

Files of text and a token file are shared out by document: a share to train on, one to measure on,
one to calibrate with (`study.text.survey` says how large). Those of another study are read in
place.
"""

import hashlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

from base.errors import UserError
from base.files import sha256_of
from study.definition import Study, load_study
from study.text_kinds import USES, OwnText, PreparedText, TokenFile, places_of
from train.data.manifest import HASHED_AT_START_BYTES, read_manifest
from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer, vocabulary_size

SAMPLED_BLOCKS, BLOCK_BYTES = 256, 1 << 20  # of files too large to be hashed at every start
HASH_CHARACTERS = 8  # of the identity, in the study's name
LABEL_CHARACTERS = 40
DEFAULT_KEY = "text"
FORMS = "FILES of text, PREFIX of a token file, or the directory of a study"

Kind = Literal["files", "prefix", "study"]


class TextOptions(NamedTuple):
    """The options --text, --tokenizer and --key."""

    paths: tuple[Path, ...]
    tokenizer: Path | None = None
    key: str | None = None  # None: 'text', of files


class TextSource(NamedTuple):
    """The text that the options name: absolute places, and the SHA-256 of what is in them."""

    kind: Kind
    places: tuple[Path, ...]
    tokenizer: Path | None  # None: one is trained
    key: str
    sha256: str
    suffix: str  # of a study's name


def source_of(options: TextOptions) -> TextSource:
    """Return what the options name; UserError for what is missing, empty or of no known kind."""
    places = tuple(path.absolute() for path in options.paths)
    kind, *others = {_kind_of(path) for path in places}
    if others or (kind != "files" and len(places) > 1):
        raise UserError(
            f"--text names places of several kinds, or more than one that is not text; give {FORMS}"
        )
    if kind == "files":
        from train.data.documents import TextFile, check_given_once  # pyarrow

        check_given_once([TextFile(path=path) for path in places])
    elif options.key is not None:
        raise UserError(
            f"--key {options.key} is for files of text, {places[0]} holds tokens; leave it out"
        )
    label = places[0].name.partition(".")[0] if kind == "files" else places[0].name
    label = re.sub(r"[^A-Za-z0-9_=+-]+", "-", label)[:LABEL_CHARACTERS]
    label += f"+{len(places) - 1}" if len(places) > 1 else ""
    tokenizer = options.tokenizer.absolute() if options.tokenizer else None
    if kind == "study":
        places, tokenizer = _of_study(places[0], tokenizer)
    if kind == "prefix" and tokenizer is None:
        raise UserError(
            f"{places[0]} does not say which tokenizer made it; name its directory with --tokenizer"
        )
    if tokenizer:
        load_tokenizer(tokenizer)
    key = DEFAULT_KEY if options.key is None else options.key
    sha256 = _identity(kind, places, tokenizer, key)
    suffix = f"-text={label}.{sha256[:HASH_CHARACTERS]}"
    return TextSource(kind, places, tokenizer, key, sha256, suffix)


def _kind_of(path: Path) -> Kind:
    if (path / "study.json").is_file():
        return "study"
    if path.is_dir():
        raise UserError(f"{path} is a directory without a study; give its files, --text {path}/*")
    if path.is_file() and path.stat().st_size:
        return "files"
    if Path(f"{path}.json").is_file():
        return "prefix"
    what = "is empty or no regular file" if path.exists() else "does not exist"
    raise UserError(f"{path} {what}; --text takes {FORMS}")


def _of_study(directory: Path, tokenizer: Path | None) -> tuple[tuple[Path, ...], Path]:
    """Return the token files of a study that has them, and its tokenizer."""
    if tokenizer:
        raise UserError(f"{directory} is a study and has its tokenizer; leave --tokenizer out")
    roots = {"{study}": directory, "{root}": directory.parent}
    places = {}
    for use, prefix in places_of(load_study(directory).text).items():
        root, _, rest = prefix.partition("/")
        places[use] = roots[root] / rest if root in roots else Path(prefix)
    tokenizer = places.pop("tokenizer")
    for path in places.values():
        if not Path(f"{path}.json").is_file():
            raise UserError(
                f"{path}.json does not exist; run 'python -m study run {directory.name}"
                f" --root {directory.parent}' first, which makes that text, or give another"
            )
    return tuple(places[use] for use in USES if use in places), tokenizer


def _identity(kind: Kind, places: tuple[Path, ...], tokenizer: Path | None, key: str) -> str:
    """Return the SHA-256 of what is in the places, in order, of the tokenizer and of the key.

    Files that are together above 256 MiB are known by their sizes and by blocks spread over them.
    """
    digest = hashlib.sha256(
        sha256_of(tokenizer / TOKENIZER_JSON).encode() if tokenizer else b"trained"
    )
    if kind != "files":
        from train.data.corpus import open_source

        for path in places:
            digest.update(open_source(path, verify_hashes=True).manifest.sha256.encode())
        return digest.hexdigest()
    digest.update(b"" if key == DEFAULT_KEY else key.encode())
    whole = sum(path.stat().st_size for path in places) <= HASHED_AT_START_BYTES
    for path in places:
        # Sizes separate the files: moving text from one to the next changes the hash.
        digest.update(f"{path.stat().st_size}:".encode())
        digest.update(sha256_of(path).encode() if whole else _sampled(path, len(places)))
    return digest.hexdigest()


def _sampled(path: Path, files: int) -> bytes:
    """Return a hash of blocks spread evenly over a file, its first and its last ones among them."""
    digest, count = hashlib.sha256(), max(2, SAMPLED_BLOCKS // files)
    with path.open("rb") as file:
        for number in range(count):
            # Block 0 begins at 0, the last one ends at the end of the file.
            file.seek(max(0, path.stat().st_size - BLOCK_BYTES) * number // (count - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.digest()


def check_unchanged(text: OwnText) -> None:
    """UserError where what a text is made of is gone or changed since the study was started."""
    tokenizer = Path(text.tokenizer) if text.tokenizer else None
    options = TextOptions(tuple(map(Path, text.sources)), tokenizer, text.key)
    if source_of(options).sha256 != text.sha256:
        raise UserError(
            f"{text.sources[0]}{' or another file' if len(text.sources) > 1 else ''} was changed"
            " since the study was started with it; restore it, or start another study with --text"
        )


def text_of(study: Study, source: TextSource) -> OwnText | PreparedText:
    """Return what a study takes of a text.

    Raises:
        UserError: too little text or too few documents, another tokenizer or vocabulary.
    """
    from study.text import survey  # numpy and pyarrow

    # rows of the models bound the tokenizer, given or yet to be trained
    needs = survey.needs_of(study)
    vocab_size = min((run.model.vocab_size for run in study.trained), default=None)
    if source.tokenizer:
        size = vocabulary_size(load_tokenizer(source.tokenizer)[0])
        if vocab_size is not None and size > vocab_size:
            raise UserError(
                f"{source.tokenizer} has tokens up to {size - 1:,}, the models of {study.name} have"
                f" rows for {vocab_size:,}; give another --tokenizer, or --set model.vocab_size="
                f"{-(-size // 128) * 128}"
            )
        vocab_size = vocab_size or size

    # token files of another study are read in place
    if source.kind == "study":
        return _in_place(study, source, (needs.train, needs.held_out, needs.calibration))
    if vocab_size is None:
        raise UserError(
            f"{study.name} trains nothing, its models have their tokenizer; name it with"
            " --tokenizer"
        )

    # places of documents for each use, by how many tokens there are
    if source.kind == "prefix" and source.tokenizer:
        sizes = survey.survey_tokens(source.places[0], sha256_of(source.tokenizer / TOKENIZER_JSON))
    else:
        sizes = survey.survey_files(source.places, source.key, source.tokenizer, vocab_size)
    shares = survey.shares_of(sizes, needs, ", ".join(path.name for path in source.places[:3]))
    return OwnText(
        sources=tuple(map(str, source.places)),
        key=source.key if source.kind == "files" else None,
        sha256=source.sha256,
        tokenizer=str(source.tokenizer) if source.tokenizer else None,
        vocab_size=vocab_size,
        train=shares.get("train"),
        train_tokens=needs.train,
        held_out=shares["held_out"],
        held_out_tokens=needs.held_out,
        document_tokens=needs.document_tokens,
        calibration=shares["calibration"],
        calibration_tokens=needs.calibration,
    )


def _in_place(study: Study, source: TextSource, needed: tuple[int, ...]) -> PreparedText:
    """Return the token files of another study by use, checked for their length."""
    *train, held_out, calibration = source.places
    if study.trained:  # the context of released models is not known yet
        if not train:
            raise UserError(f"{study.name} trains on text, --text names a study without any")
        for prefix, tokens in zip(source.places, needed, strict=True):
            there = read_manifest(prefix).tokens
            if there < tokens:
                raise UserError(
                    f"{prefix} holds {there:,} tokens, {study.name} reads {tokens:,} of it; give"
                    " more text"
                )
    return PreparedText(
        train=TokenFile(name=str(train[0])) if study.trained else None,
        held_out=TokenFile(name=str(held_out)),
        calibration=TokenFile(name=str(calibration)),
        tokenizer=str(source.tokenizer),
        sha256=source.sha256,
    )
