"""Documents of tasks: datasets of the Hugging Face hub, or local JSON Lines files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import HfApi, constants

from base.errors import UserError
from base.files import sha256_of
from base.reading import nested_deeper
from quant_eval.paper_tasks import (
    FEWSHOT_SUFFIX,
    PaperTask,
    examples_of,
    is_of_examples,
    local_files,
)
from train.data.documents import json_lines

TIMEOUT_SECONDS = 30.0
OWN_EXAMPLES = "the evaluated items, without the asked one"


MOST_DEPTH = 8  # of a document; the time of making a dataset doubles with each


@dataclass(frozen=True)
class TaskDocuments:
    """The documents of one task of lm-eval: splits under its names for them.

    Attributes:
        overrides: keys of lm-eval's definition that these documents ask for.
        file: of the evaluated documents; None: they are the hub's.
    """

    splits: DatasetDict
    overrides: dict[str, Any]
    file: Path | None = None


Sources = tuple[
    dict[str, Any], dict[str, TaskDocuments]
]  # a record for the result, sources by leaf


def from_hub(row: PaperTask, configs: dict[str, str | None]) -> Sources:
    """Return the documents of a task at one recorded revision, or of the hub's local cache.

    `configs` are the dataset's configurations by lm-eval's task names. UserError if one cannot be
    loaded.
    """
    revision, fewshot, sources = hub_revision(row), row.fewshot, {}
    for leaf, config in configs.items():
        try:
            splits: Any = load_dataset(row.dataset, config, revision=revision)
        except (DatasetsError, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
            raise _load_error(row, error) from None
        if row.name == "pubmedqa":
            # its one split, the labelled items, does not mark those that the authors test on
            splits = DatasetDict({row.evaluated: splits["train"]})
        overrides = dict(row.overrides)
        if row.fewshot not in splits:
            overrides, fewshot = overrides | _own_examples(row), OWN_EXAMPLES
        sources[leaf] = TaskDocuments(splits, overrides)
    record = {"dataset": row.dataset, "config": row.config, "revision": revision, "note": row.note}
    return record | {"evaluated": row.evaluated, "fewshot": fewshot}, sources


def hub_revision(row: PaperTask) -> str | None:
    """Return the commit of the task's dataset, None with HF_HUB_OFFLINE set.

    Asked once and without repetition: the dataset's own loader repeats for half a minute where
    there is no network.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(row.dataset, timeout=TIMEOUT_SECONDS).sha
    except (httpx.HTTPError, OSError) as error:
        raise _load_error(row, error) from None


def _load_error(row: PaperTask, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    where = f"{row.name}/SUBJECT.jsonl" if row.name == "mmlu" else f"{row.name}.jsonl"
    return UserError(
        f"dataset {row.dataset} of task {row.name} cannot be loaded ({reason:.200}); connect to"
        " the network, set HF_HUB_OFFLINE=1 if it is cached, or give local documents: --task-files"
        f" DIR with DIR/{where}"
    )


def _own_examples(row: PaperTask) -> dict[str, Any]:
    """Return settings that take examples from the evaluated items.

    lm-eval leaves the asked item out of the examples of its test split only.
    """
    return {"test_split": row.evaluated, "fewshot_split": row.evaluated}


def from_files(row: PaperTask, leaves: list[str], directory: Path) -> Sources:
    """Read DIR/TASK.jsonl, of mmlu DIR/mmlu/SUBJECT.jsonl.

    Examples are in TASK.fewshot.jsonl.

    UserError if a file is missing, or holds anything but objects that are alike.
    """
    files = {row.name: directory / f"{row.name}.jsonl"}
    if row.name == "mmlu":
        paths = {leaf: directory / f"mmlu/{leaf.removeprefix('mmlu_')}.jsonl" for leaf in leaves}
        files = {leaf: path for leaf, path in paths.items() if path.exists()}
        present = {path for path in local_files(row.name, directory) if not is_of_examples(path)}
        # A file that is no subject would be left out without a word.
        strays = present - set(files.values())
        if not files or strays:
            raise UserError(
                f"{min(strays, default=directory / 'mmlu')} holds no subject of"
                f" mmlu; they are {', '.join(path.stem for path in paths.values())}"
            )

    # examples from their own files, or else from the evaluated items
    sources = {}
    with_examples = any(examples_of(path).exists() for path in files.values())
    for leaf, path in files.items():
        splits, overrides = {row.evaluated: _read(path)}, dict(row.overrides)
        if with_examples:  # of all leaves or of none
            splits[row.fewshot] = _read(examples_of(path))
        else:
            overrides |= _own_examples(row)
        sources[leaf] = TaskDocuments(DatasetDict(splits), overrides, path)
    hashes = {str(path): sha256_of(path) for path in local_files(row.name, directory)}
    drawn_from = f"*{FEWSHOT_SUFFIX}" if with_examples else OWN_EXAMPLES
    return {"files": hashes, "evaluated": "all", "fewshot": drawn_from}, sources


def _read(path: Path) -> Dataset:
    if not path.exists():
        raise UserError(
            f"{path} does not exist; write it, a document of the task's dataset a line, or leave"
            " the task out of --tasks"
        )
    documents: list[Any] = []
    for line, document in json_lines(path):
        documents.append(document)
        # a Dataset would fill what is missing in a line with nulls, and lm-eval score those
        if nested_deeper(document, MOST_DEPTH):
            raise UserError(f"{line} is nested more than {MOST_DEPTH} deep; correct it")
        if not isinstance(document, dict) or _fields(document) != _fields(documents[0]):
            raise UserError(
                f"{line} is not an object with the fields of the first line and their types,"
                f" {', '.join(_fields(documents[0]))}; correct it"
            )
    if not documents:
        raise UserError(f"{path} holds no document; write one a line, or leave the task out")
    try:
        return Dataset.from_list(documents)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} does not make a dataset ({reason}); correct it") from None


def _fields(value: Any, name: str = "") -> list[str]:
    """Return the names of all fields with their types."""
    if isinstance(value, dict):
        return sorted(field for key in value for field in _fields(value[key], f"{name}.{key}"))
    return [f"{name.removeprefix('.')} ({type(value).__name__})"]
