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
from quant_eval.paper_tasks import MMLU_TAGS, PAPER_TASKS, PaperTask, examples_of
from quant_eval.settings import TaskSettings
from quant_eval.tasks.documents import TaskDocuments, from_files, from_hub

# What lm-eval's definitions raise on a document that does not fit them.
UNFIT = (
    *(ValueError, KeyError, IndexError, TypeError, SyntaxError, AttributeError),
    jinja2.TemplateError,
)


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


def load_tasks(settings: TaskSettings) -> list[LoadedTask]:
    """Return the tasks of the settings.

    UserError if a document is missing or does not fit.
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
    if settings.task_files is not None:
        record, sources = from_files(row, leaves, settings.task_files)
    elif row.name == "mmlu":
        configs = {leaf: manager.task_index[leaf].cfg["dataset_name"] for leaf in leaves}
        record, sources = from_hub(row, configs)
    else:
        record, sources = from_hub(row, {row.name: row.config})
    if settings.shots == 0:
        record.pop("fewshot")
    tasks = [_build(row, leaf, source, manager) for leaf, source in sources.items()]
    unanswerable = sum(
        _check(task, row, source, settings)
        for task, source in zip(tasks, sources.values(), strict=True)
    )
    scored = tasks[0]
    if row.name == "mmlu":
        # By size, so that it is the accuracy over all items, which `evaluate_tasks` compares with
        # its own.
        scored = Group(
            row.name, aggregate_metric_list=[AggMetricConfig("acc", weight_by_size=True)]
        )
        for task in tasks:
            scored.add(task)
    return LoadedTask(row.name, scored, tuple(sources), record, unanswerable)


def _build(row: PaperTask, leaf: str, source: TaskDocuments, manager: TaskManager) -> Any:
    """Return lm-eval's task of that name on our documents, otherwise as lm-eval defines it."""

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


def _check(task: Any, row: PaperTask, source: TaskDocuments, settings: TaskSettings) -> int:
    """Return the number of items without an answer, which local files must not have."""
    problems = _problems(task, list(task.eval_docs)[: settings.limit])
    if source.file is None:
        return len(problems)
    pool = list(task.fewshot_docs())
    is_shared = task.fewshot_cfg.split == row.evaluated
    examples = source.file if is_shared else examples_of(source.file)
    for path, by_index in ((source.file, problems), (examples, _problems(task, pool))):
        for index, problem in by_index.items():
            raise UserError(f"{path}, document {index + 1}: {problem}; correct the document")
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
    """Return the reason why a document cannot be answered, by the index of each such document."""
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
