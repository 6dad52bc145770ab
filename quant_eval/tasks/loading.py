"""Loading of lm-eval's tasks by name, with every document checked."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import jinja2
import lm_eval.tasks
from datasets import DatasetDict
from lm_eval.api.group import Group
from lm_eval.config.group import AggMetricConfig
from lm_eval.tasks import TaskManager

from base.errors import UserError
from base.files import sha256_of
from quant_eval.tasks.documents import read_documents
from quant_eval.tasks.hub import hub_revision, hub_splits
from quant_eval.tasks.settings import TaskSettings
from quant_eval.tasks.table import MMLU_TAGS, PAPER_TASKS, PaperTask

# What lm-eval's definitions raise on a document that does not fit them.
UNFIT = (
    *(ValueError, KeyError, IndexError, TypeError, SyntaxError, AttributeError),
    jinja2.TemplateError,
)
FEWSHOT_SUFFIX = ".fewshot.jsonl"
OWN_EXAMPLES = "the evaluated items, without the asked one"


@dataclass(frozen=True)
class LoadedTask:
    """One task of the table, ready for `simple_evaluate`.

    Attributes:
        task: lm-eval's own task, or group of tasks.
        leaves: names of the tasks whose items it is scored on: itself, or the subjects of a group.
        source: where the documents come from, for the record.
        unanswerable: number of items whose answer is none of their choices; lm-eval scores them as
            wrong.
    """

    name: str
    task: Any
    leaves: tuple[str, ...]
    source: dict[str, Any]
    unanswerable: int


@dataclass(frozen=True)
class _Source:
    """The documents of one leaf: splits under lm-eval's names for them."""

    splits: DatasetDict
    overrides: dict[str, Any]
    file: Path | None = None


def load_tasks(settings: TaskSettings) -> list[LoadedTask]:
    """Return the tasks of the settings, all documents at hand.

    Raises:
        UserError: a document is missing, or is none of its task's.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every setting that is given
    datasets.disable_progress_bars()
    definitions = Path(lm_eval.tasks.__file__).parent
    folders = sorted({PAPER_TASKS[name].folder for name in settings.names})
    manager = TaskManager(
        include_defaults=False, include_path=[definitions / folder for folder in folders]
    )
    return [_load(PAPER_TASKS[name], manager, settings) for name in settings.names]


def _load(row: PaperTask, manager: TaskManager, settings: TaskSettings) -> LoadedTask:
    leaves = [row.name]
    if row.name == "mmlu":
        leaves = sorted(leaf for tag in MMLU_TAGS for leaf in manager.task_index[tag].tags)
    if settings.task_files is None:
        record, sources = _from_hub(row, leaves, manager)
    else:
        record, sources = _from_files(row, leaves, settings.task_files)
    if settings.shots == 0:
        record.pop("fewshot")
    tasks = [_build(row, leaf, source, manager) for leaf, source in sources.items()]
    unanswerable = sum(
        _check(task, row, source, settings)
        for task, source in zip(tasks, sources.values(), strict=True)
    )
    whole = tasks[0]
    if row.name == "mmlu":
        whole = Group(row.name, aggregate_metric_list=[AggMetricConfig("acc", weight_by_size=True)])
        for task in tasks:
            whole.add(task)
    return LoadedTask(row.name, whole, tuple(sources), record, unanswerable)


def _from_hub(
    row: PaperTask, leaves: list[str], manager: TaskManager
) -> tuple[dict[str, Any], dict[str, _Source]]:
    revision = hub_revision(row)
    sources, fewshot = {}, row.fewshot
    for leaf in leaves:
        config = row.config if row.name != "mmlu" else manager.task_index[leaf].cfg["dataset_name"]
        splits, overrides = hub_splits(row, config, revision), dict(row.overrides)
        if row.fewshot not in splits:
            overrides, fewshot = overrides | _own_examples(row), OWN_EXAMPLES
        sources[leaf] = _Source(splits, overrides)
    record = {"dataset": row.dataset, "config": row.config, "revision": revision, "note": row.note}
    return record | {"evaluated": row.evaluated, "fewshot": fewshot}, sources


def _own_examples(row: PaperTask) -> dict[str, Any]:
    """Return settings that take examples from the evaluated items.

    lm-eval leaves the asked item out of the examples of its test split only.
    """
    return {"test_split": row.evaluated, "fewshot_split": row.evaluated}


def _from_files(
    row: PaperTask, leaves: list[str], directory: Path
) -> tuple[dict[str, Any], dict[str, _Source]]:
    """Read DIR/TASK.jsonl, of mmlu DIR/mmlu/SUBJECT.jsonl; examples are in TASK.fewshot.jsonl."""
    files = {row.name: directory / f"{row.name}.jsonl"}
    if row.name == "mmlu":
        paths = {leaf: directory / f"mmlu/{leaf.removeprefix('mmlu_')}.jsonl" for leaf in leaves}
        files = {leaf: path for leaf, path in paths.items() if path.exists()}
        held = {path for path in directory.glob("mmlu/*.jsonl") if FEWSHOT_SUFFIX not in path.name}
        if not files or held - set(files.values()):
            raise UserError(
                f"{min(held - set(files.values()), default=directory / 'mmlu')} holds no subject of"
                f" mmlu; they are {', '.join(path.stem for path in paths.values())}"
            )
    sources, hashes = {}, {}
    examples = {path: path.with_name(path.stem + FEWSHOT_SUFFIX) for path in files.values()}
    with_examples = any(path.exists() for path in examples.values())
    for leaf, path in files.items():
        splits, overrides = {row.evaluated: read_documents(path)}, dict(row.overrides)
        hashes[str(path)] = sha256_of(path)
        if with_examples:  # of all leaves or of none
            splits[row.fewshot] = read_documents(examples[path])
            hashes[str(examples[path])] = sha256_of(examples[path])
        else:
            overrides |= _own_examples(row)
        sources[leaf] = _Source(DatasetDict(splits), overrides, path)
    drawn_from = f"*{FEWSHOT_SUFFIX}" if with_examples else OWN_EXAMPLES
    return {"files": hashes, "evaluated": "all", "fewshot": drawn_from}, sources


def _build(row: PaperTask, leaf: str, source: _Source, manager: TaskManager) -> Any:
    """Return lm-eval's task of that name on our documents; the rest is as it defines it."""

    def documents(**_metadata: Any) -> DatasetDict:
        return source.splits

    entry = {"task": leaf, "custom_dataset": documents, **source.overrides}
    try:
        return manager.load({"group": f"only {leaf}", "task": [entry]})["tasks"][leaf]
    except UNFIT as error:
        if source.file is None:
            raise
        raise UserError(
            f"{source.file}: lm-eval cannot read its documents as {row.name}"
            f" ({type(error).__name__}: {error}); correct them"
        ) from None


def _check(task: Any, row: PaperTask, source: _Source, settings: TaskSettings) -> int:
    """Return the number of items without an answer; local files must not have any."""
    problems = _problems(task, list(task.eval_docs)[: settings.limit])
    if source.file is None:
        return len(problems)
    pool = list(task.fewshot_docs())
    own = task.fewshot_cfg.split == row.evaluated
    examples = source.file if own else source.file.with_name(source.file.stem + FEWSHOT_SUFFIX)
    for path, found in ((source.file, problems), (examples, _problems(task, pool))):
        for index, problem in found.items():
            raise UserError(f"{path}, line {index + 1}: {problem}; correct the document")
    # lm-eval draws one more than it needs wherever the asked item might be among them.
    needed = settings.shots + (task.fewshot_cfg.split == task.config.test_split)
    different = len({repr(document) for document in pool})
    if settings.shots and different < needed:
        raise UserError(
            f"{examples} holds {different} different documents, {settings.shots} examples need"
            f" {needed}; lower --shots or add documents"
        )
    return 0


def _problems(task: Any, documents: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return what keeps each document that cannot be answered from being so, by its index."""
    problems = {}
    for index, document in enumerate(documents):
        try:
            choices = task.doc_to_choice(document)
            question, target = task.doc_to_text(document), task.doc_to_target(document)
        except UNFIT as error:
            problems[index] = f"lm-eval cannot read it ({type(error).__name__}: {error})"
            continue
        answer = question if task.multiple_input else target
        answerable = 0 <= answer < len(choices) if isinstance(answer, int) else answer in choices
        if not answerable:
            problems[index] = f"its answer {answer!r} is none of its {len(choices)} choices"
    return problems
