"""Real text that is the same on every machine: the source of pinned packages, and a tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files, version
from itertools import accumulate
from pathlib import Path

from base.errors import UserError
from base.files import committed_directory, record_files, write_json
from base.progress import Progress
from study.text.tokenizer import save_tokenizer, train_tokenizer
from train.data.manifest import PLACES, Share, place_of

SKIPPED_DIRECTORIES = {"tests", "benchmarks", "_antlr"}  # _antlr: tables written by a program
SHARES = {
    "held_out": Share(first=0, stop=150_000),
    "calibration": Share(first=150_000, stop=200_000),
    "train": Share(first=200_000, stop=PLACES),
}
PASSAGE_CHARACTERS = 1500  # of a held-out file: about 500 tokens of a vocabulary of 2,048
LONG_LINE = 20  # characters of a line that two files hardly share by chance
MOST_COPIED = 0.5  # of the long lines of a held-out passage, those that a training file has
TOKENIZER_CHARACTERS = 8_000_000  # of the training text: more change few of 2,048 tokens


def check_versions(packages: Sequence[str]) -> None:
    """Raise UserError where a package NAME==VERSION#sha256=HASH is not installed in its version."""
    for package in packages:
        requirement = package.partition("#")[0]
        name, _, wanted = requirement.partition("==")
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = "not installed"
        if installed != wanted:
            raise _refusal(requirement, f"the text is of {requirement}, here {name} is {installed}")


def read_package(package: str) -> dict[str, str]:
    """Return the Python files of an installed package by path, without tests.

    Raises:
        UserError: the package is missing, of another version, or its files have another hash.
    """
    check_versions([package])
    requirement, _, sha256 = package.partition("#sha256=")
    name = requirement.partition("==")[0]
    places = {path.as_posix(): Path(str(path.locate())) for path in files(name) or []}
    contents = {
        path: source.read_bytes()
        for path, source in sorted(places.items())
        if _is_source(path, name) and source.is_file()
    }
    digest = hashlib.sha256()
    for path, content in contents.items():
        # A NUL ends the path and the hash has one length: no other files give the same bytes.
        digest.update(path.encode() + b"\0" + hashlib.sha256(content).digest())
    if digest.hexdigest() != sha256:
        raise _refusal(
            requirement, f"the installed files of {requirement} are not the released ones"
        )
    return {path: content.decode() for path, content in contents.items() if content.strip()}


def _is_source(path: str, name: str) -> bool:
    top, *folders = path.split("/")[:-1] or [""]
    return path.endswith(".py") and top == name and SKIPPED_DIRECTORIES.isdisjoint(folders)


def _refusal(requirement: str, what: str) -> UserError:
    return UserError(
        f"{what}; run 'python -m pip install --force-reinstall --no-deps {requirement}', or take"
        " text of your own with --text"
    )


def passage_of(text: str, characters: int) -> str:
    """Return whole lines of at most so many characters, from the middle of a text.

    Files begin with imports and licenses, which repeat those of other files.
    """
    # Both ends move to line ends, so the passage is at most as long as asked.
    start = text.find("\n", (len(text) - characters) // 2) + 1
    return text[start : text.rfind("\n", start, start + characters) + 1]


def copied_share(passage: str, lines: set[str]) -> float:
    """Return the share of a passage's long lines, by characters, that are among `lines`."""
    long = _long_lines(passage)
    return sum(len(line) for line in long if line in lines) / max(1, sum(map(len, long)))


def _long_lines(text: str) -> list[str]:
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if len(line) >= LONG_LINE]


def split(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the documents of every use by path, in the order of a hash of their content.

    Files to train on and to calibrate with come whole. A held-out document is a passage of a file:
    losses resample documents, so many short ones of equal length tell more than a few long ones,
    and any prefix is a sample of all. Files shorter than a passage, and passages most of which a
    training file has as well, are left out.
    """
    places = {path: place_of(text.encode()) for path, text in texts.items()}
    # By place, then by path: files of equal content have one place.
    ordered = sorted(texts, key=lambda path: (places[path], path))
    documents = {
        use: {path: texts[path] for path in ordered if share.first <= places[path] < share.stop}
        for use, share in SHARES.items()
    }
    # A held-out passage is copied as far as training files hold its long lines.
    lines = {line for text in documents["train"].values() for line in _long_lines(text)}
    passages = {
        path: passage_of(text, PASSAGE_CHARACTERS)
        for path, text in documents["held_out"].items()
        if len(text) > PASSAGE_CHARACTERS
    }
    documents["held_out"] = {
        path: passage
        for path, passage in passages.items()
        if copied_share(passage, lines) <= MOST_COPIED
    }
    return documents


def build_corpus(out: Path, vocab_size: int, packages: Sequence[str]) -> None:
    """Write OUT/{train,held_out,calibration}.jsonl, OUT/tokenizer/ and, last, OUT/corpus.json.

    The tokenizer sees the first of the training files alone.
    """
    texts: dict[str, str] = {}
    with Progress("corpus", total=len(packages)) as progress:
        for package in packages:
            texts |= read_package(package)
            progress.advance()
    documents = split(texts)
    train = list(documents["train"].values())
    first = [
        text
        # `end` is the number of characters up to and with this text.
        for text, end in zip(train, accumulate(map(len, train)), strict=True)
        if end <= TOKENIZER_CHARACTERS
    ]
    with committed_directory(out) as directory:
        for use, chosen in documents.items():
            lines = [
                json.dumps({"text": text, "path": path}) + "\n" for path, text in chosen.items()
            ]
            (directory / f"{use}.jsonl").write_text("".join(lines))
        save_tokenizer(train_tokenizer(first, vocab_size), directory / "tokenizer")
        records = {name: record.model_dump() for name, record in record_files(directory).items()}
        content = {"packages": packages, "files": records}
        write_json(directory / "corpus.json", content)
