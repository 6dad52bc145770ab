"""Real text that every machine has: the source of Python's standard library, and a tokenizer."""

import hashlib
import json
import platform
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from base.errors import UserError
from base.files import committed_directory, record_files, write_json
from base.progress import Progress
from ckpt_tools.released.tokenizer import check_replaceable
from train.data.documents import read_documents
from train.data.share import Share

END_OF_TEXT = "<|endoftext|>"
SKIPPED_DIRECTORIES = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
}
HELD_OUT_PERCENT = 10  # of the files, kept for measuring
HELD_OUT_CHARACTERS = 2400  # kept of each of them
TOKENIZER_BYTES = 1 << 30  # of text that a tokenizer is trained on
MINIMAL_FILES = 100  # fewer are no standard library (some distributions ship it zipped)


def source_files(root: Path) -> dict[str, Path]:
    """Return the Python files below `root` by relative path, without tests and packages."""
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return {
        name: path
        for name, path in sorted(files.items())
        if path.is_file() and SKIPPED_DIRECTORIES.isdisjoint(name.split("/")[:-1])
    }


def _digest(relative_path: str) -> int:
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8], "big")


def is_held_out(relative_path: str) -> bool:
    """Return whether a file is kept for measuring, by its path alone: new files move none."""
    return _digest(relative_path) % 100 < HELD_OUT_PERCENT


def head_of(text: str, characters: int) -> str:
    """Return the whole lines within `characters` of the beginning; at least the cut first line."""
    if len(text) <= characters:
        return text
    return text[: text.rfind("\n", 0, characters) + 1] or text[:characters]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE whose token 0 ends a text; it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}; give more text"
            " or lower the vocabulary (of a study: give a --tokenizer, or --set model.vocab_size)"
        )
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", config)


def build_tokenizer(sources: Sequence[Path], out: Path, *, vocab_size: int, share: Share) -> None:
    """Write a tokenizer that is trained on the first GiB of a share of the documents."""
    check_replaceable(out)
    tokenizer = train_tokenizer(_first_documents(sources, share), vocab_size)
    with committed_directory(out) as aside:
        _save_tokenizer(tokenizer, aside)


def _first_documents(sources: Sequence[Path], share: Share) -> Iterator[str]:
    read = 0
    with Progress("tokenizer", total=len(sources)) as progress:
        for path in sources:
            for text in read_documents(path):
                content = text.encode()
                if share.holds(content):
                    yield text
                    read += len(content)
                if read >= TOKENIZER_BYTES:
                    return
            progress.advance()


def build_corpus(out: Path, vocab_size: int, root: Path | None = None) -> None:
    """Write OUT/{train,held_out}.jsonl, OUT/tokenizer/ and, last, OUT/corpus.json.

    Training files come whole and in the order of their paths. Held-out files come in the order of a
    hash of their paths, each cut to its beginning: intervals resample documents, so many short ones
    tell more than a few long ones, and any prefix of the split is a sample of all of it. The
    tokenizer sees the training files alone.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = source_files(root)
    if len(files) < MINIMAL_FILES:
        raise UserError(
            f"{root} holds {len(files)} Python files; use an interpreter with an unzipped standard"
            " library"
        )
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "held_out": []}
    with Progress("corpus", total=len(files)) as progress:
        for relative, path in files.items():
            held_out = is_held_out(relative)
            with tokenize.open(path) as file:  # decodes by the file's own coding line
                text = file.read()
            if text.strip():
                kept = head_of(text, HELD_OUT_CHARACTERS) if held_out else text
                splits["held_out" if held_out else "train"].append((relative, kept))
            progress.advance()
    splits["held_out"].sort(key=lambda document: _digest(document[0]))
    with committed_directory(out) as directory:
        for split, documents in splits.items():
            lines = [
                json.dumps({"text": text, "path": relative}) + "\n" for relative, text in documents
            ]
            (directory / f"{split}.jsonl").write_text("".join(lines))
        _save_tokenizer(
            train_tokenizer([text for _, text in splits["train"]], vocab_size),
            directory / "tokenizer",
        )
        records = {name: one.model_dump() for name, one in record_files(directory).items()}
        content = {"python": platform.python_version(), "files": records}
        write_json(directory / "corpus.json", content)
