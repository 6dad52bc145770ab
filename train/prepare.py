"""Text to token files: the work behind `python -m train prepare`."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from train.command import Progress, UserError
from train.data import Manifest, write_index
from train.run_directory import (
    FileRecord,
    fsync_path,
    record_files,
    scratch_directory,
    sha256_of,
    write_json,
)

TOKENIZER_JSON = "tokenizer.json"
DOCUMENTS_PER_CALL = 64


def read_documents(source: Path) -> Iterator[str]:
    """Texts of one file: a .jsonl holds one object with a 'text' per line, any other file is one document."""
    try:
        if source.suffix != ".jsonl":
            with source.open(encoding="utf-8", newline="") as file:  # line ends stay as they are
                yield file.read()
            return
        with source.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    text = json.loads(line)["text"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    raise UserError(f"{source}:{number} is no JSON object with a 'text'; correct the line") from None
                if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
                    raise UserError(f"{source}:{number}: 'text' is no string of valid Unicode; correct the line")
                yield text
    except FileNotFoundError:
        raise UserError(f"{source} does not exist; give text or .jsonl files") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from None


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    texts: list[str] = []
    for text in documents:
        texts.append(text)
        if len(texts) == DOCUMENTS_PER_CALL:
            yield texts
            texts = []
    if texts:
        yield texts


def load_tokenizer(directory: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of an HF directory and the id of its end-of-text token."""
    path, config_path = directory / TOKENIZER_JSON, directory / "tokenizer_config.json"
    if not path.is_file() or not config_path.is_file():
        raise UserError(f"{directory} holds no tokenizer.json and tokenizer_config.json; give a tokenizer directory")
    try:
        eos_token = json.loads(config_path.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config_path} is damaged ({error}); copy the tokenizer again") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  tokenizers raises nothing narrower for a damaged file
        raise UserError(f"{path} is damaged ({error}); copy the tokenizer again") from None
    if isinstance(eos_token, dict):
        eos_token = eos_token["content"]
    eos_token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if eos_token_id is None:
        raise UserError(f"{config_path} names no eos_token of the vocabulary; documents could not be told apart")
    return tokenizer, eos_token_id


def prepare(sources: list[Path], tokenizer_dir: Path, prefix: Path) -> Manifest:
    """Tokenizes the sources in the given order into PREFIX.bin/.idx and PREFIX.json, the manifest, written last.

    Every document gets the end-of-text token at its end; nothing else is added. The files are written aside first.
    """
    tokenizer, eos_token_id = load_tokenizer(tokenizer_dir)
    vocab_size = tokenizer.get_vocab_size()
    dtype: np.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    max_token_id, digest = -1, hashlib.sha256()
    with scratch_directory(prefix.parent / f".{prefix.name}.partial") as aside:
        with (aside / "bin").open("wb") as file, Progress("prepare", total=len(sources)) as progress:
            for source in sources:
                for texts in _batches(read_documents(source)):
                    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                        tokens = np.array([*encoding.ids, eos_token_id], dtype)
                        max_token_id = max(max_token_id, int(tokens.max()))
                        file.write(tokens.tobytes())
                        digest.update(tokens.tobytes())
                        lengths.append(len(tokens))
                progress.advance()
        if not lengths:
            raise UserError(f"no document in {len(sources)} source(s); give files that hold text")
        write_index(aside / "idx", np.array(lengths), dtype)
        files = record_files(aside)
        assert files["bin"].sha256 == digest.hexdigest(), "what was written is not what was tokenized"
        manifest = Manifest(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            max_token_id=max_token_id,
            documents=len(lengths),
            tokens=sum(lengths),
            tokenizer_sha256=sha256_of(tokenizer_dir / TOKENIZER_JSON),
            bin=files["bin"],
            idx=files["idx"],
            sources={str(path): FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path)) for path in sources},
        )
        Path(f"{prefix}.json").unlink(missing_ok=True)  # an old manifest must not vouch for new tokens
        for suffix in files:
            os.replace(aside / suffix, f"{prefix}.{suffix}")
    fsync_path(prefix.parent)
    write_json(Path(f"{prefix}.json"), manifest.model_dump(mode="json"))
    return manifest
