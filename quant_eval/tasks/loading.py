"""From names of tasks to lm-eval's task objects, every document of them checked."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import jinja2
import lm_eval.tasks
import pyarrow
from datasets import Dataset, DatasetDict
from lm_eval.api.group import Group
from lm_eval.config.group import AggMetricConfig
from lm_eval.tasks import TaskManager

from quant_eval.tasks.documents import read_documents
from quant_eval.tasks.hub import hub_revision, hub_splits
from quant_eval.tasks.settings import TaskSettings
from quant_eval.tasks.table import MMLU_TAGS, PAPER_TASKS, PaperTask
from train.command import UserError
from train.run_directory import sha256_of

# What lm-eval's definitions raise on a document that does not fit them.
UNFIT = (ValueError, KeyError, IndexError, TypeError, SyntaxError, AttributeError, jinja2.TemplateError)
FEWSHOT_SUFFIX = ".fewshot.jsonl"
OWN_EXAMPLES = "the evaluated items, without the asked one"


@dataclass(frozen=True)
class LoadedTask:
    """One task of the table, ready for `simple_evaluate`.

    Attributes:
        task: lm-eval's own task, or group of tasks.
        leaves: names of the tasks whose items it is scored on: itself, or the subjects of a group.
        source: where the documents come from, for the record.
        unanswerable: number of items whose answer is none of their choices; lm-eval scores them as wrong.
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
    file: Path | None


def load_tasks(settings: TaskSettings) -> list[LoadedTask]:
    """The tasks of the settings, all documents at hand.

    Raises:
        UserError: a document is missing, or is none of its task's.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every setting that is given
    datasets.disable_progress_bars()
    definitions = Path(lm_eval.tasks.__file__).parent
    folders = sorted({PAPER_TASKS[name].folder for name in settings.tasks})
    manager = TaskManager(include_defaults=False, include_path=[definitions / folder for folder in folders])
    return [_load(PAPER_TASKS[name], manager, settings) for name in settings.tasks]


def _load(row: PaperTask, manager: TaskManager, settings: TaskSettings) -> LoadedTask:
    known = [row.name]
    if row.name == "mmlu":
        known = sorted(leaf for tag in MMLU_TAGS for leaf in manager.task_index[tag].tags)
    if settings.task_files is None:
        record, sources = _from_hub(row, known, manager)
    else:
        record, sources = _from_files(row, known, settings.task_files)
    tasks, unanswerable = [], 0
    for leaf, source in sources.items():
        task = _build(row, leaf, source, manager)
        unanswerable += _check_documents(task, row, source, settings)
        tasks.append(task)
    if settings.num_fewshot == 0:
        record.pop("fewshot")
    whole = tasks[0]
    if row.name == "mmlu":
        whole = Group(row.name, aggregate_metric_list=[AggMetricConfig("acc", weight_by_size=True)])
        for task in tasks:
            whole.add(task)
    return LoadedTask(row.name, whole, tuple(sources), record, unanswerable)


def _from_hub(row: PaperTask, leaves: list[str], manager: TaskManager) -> tuple[dict[str, Any], dict[str, _Source]]:
    revision = hub_revision(row)
    sources = {}
    for leaf in leaves:
        config = row.config if row.name != "mmlu" else manager.task_index[leaf].cfg["dataset_name"]
        splits, overrides = hub_splits(row, config, revision), dict(row.overrides)
        fewshot = row.fewshot
        if fewshot not in splits:
            overrides, fewshot = overrides | _own_examples(row), OWN_EXAMPLES
        sources[leaf] = _Source(splits, overrides, None)
    record = {"dataset": row.dataset, "config": row.config, "revision": revision, "note": row.note}
    return record | {"evaluated": row.evaluated, "fewshot": fewshot}, sources


def _own_examples(row: PaperTask) -> dict[str, Any]:
    """Settings that take examples from the evaluated items; lm-eval leaves the asked one out of its test split only."""
    return {"test_split": row.evaluated, "fewshot_split": row.evaluated}


def _from_files(row: PaperTask, leaves: list[str], directory: Path) -> tuple[dict[str, Any], dict[str, _Source]]:
    """DIR/TASK.jsonl, of mmlu DIR/mmlu/SUBJECT.jsonl for any of its subjects; examples from TASK.fewshot.jsonl."""
    files = {row.name: directory / f"{row.name}.jsonl"}
    if row.name == "mmlu":
        found = sorted(path for path in (directory / "mmlu").glob("*.jsonl") if not path.name.endswith(FEWSHOT_SUFFIX))
        files = {f"mmlu_{path.stem}": path for path in found}
        strange = sorted(files.keys() - set(leaves))
        if strange or not files:
            subjects = ", ".join(leaf.removeprefix("mmlu_") for leaf in leaves)
            what = f"{files[strange[0]]} is of no subject" if strange else f"{directory}/mmlu has no SUBJECT.jsonl"
            raise UserError(f"{what}; the subjects of mmlu are {subjects}")
    sources: dict[str, _Source] = {}
    hashes: dict[str, str] = {}
    drawn_from = OWN_EXAMPLES
    for leaf, path in files.items():
        splits = {row.evaluated: _dataset(path, row)}
        examples = path.with_name(path.stem + FEWSHOT_SUFFIX)
        hashes[str(path)] = sha256_of(path)
        overrides = dict(row.overrides)
        if examples.exists():
            splits[row.fewshot] = _dataset(examples, row)
            hashes[str(examples)] = sha256_of(examples)
            drawn_from = f"*{FEWSHOT_SUFFIX}"
        else:
            overrides |= _own_examples(row)
        sources[leaf] = _Source(DatasetDict(splits), overrides, path)
    if len(hashes) not in (len(files), 2 * len(files)):
        raise UserError(f"{directory}/mmlu has *{FEWSHOT_SUFFIX} for some subjects only; give it for all or for none")
    return {"files": hashes, "evaluated": "all", "fewshot": drawn_from}, sources


def _dataset(path: Path, row: PaperTask) -> Dataset:
    try:
        return Dataset.from_list(read_documents(path, row.fields))
    except (pyarrow.ArrowException, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: a field is not of one type in all lines ({reason}); make it so") from None


def _build(row: PaperTask, leaf: str, source: _Source, manager: TaskManager) -> Any:
    """lm-eval's task of that name on our documents; everything else is as it defines it."""

    def documents(**_metadata: Any) -> DatasetDict:
        return source.splits

    entry = {"task": leaf, "custom_dataset": documents, **source.overrides}
    try:
        return manager.load({"group": f"only {leaf}", "task": [entry]})["tasks"][leaf]
    except UNFIT as error:
        if source.file is None:
            raise
        raise UserError(
            f"{source.file}: lm-eval cannot read its documents as {row.name} ({type(error).__name__}: {error}); "
            f"correct them"
        ) from None


def _check_documents(task: Any, row: PaperTask, source: _Source, settings: TaskSettings) -> int:
    """The number of evaluated items without an answer among their choices, which local files must not have."""
    evaluated = list(task.eval_docs)[: settings.limit]
    problems = _problems(task, evaluated)
    if source.file is None:
        return len(problems)
    pool = list(task.fewshot_docs())
    own = task.fewshot_cfg.split == row.evaluated
    examples = source.file if own else source.file.with_name(source.file.stem + FEWSHOT_SUFFIX)
    for path, found in ((source.file, problems), (examples, _problems(task, pool))):
        if found:
            index, problem = next(iter(found.items()))
            raise UserError(f"{path}, line {index + 1}: {problem}; correct the document")
    # lm-eval draws one more than it needs wherever the asked item might be among them.
    needed = settings.num_fewshot + (task.fewshot_cfg.split == task.config.test_split)
    different = len({repr(document) for document in pool})
    if settings.num_fewshot and different < needed:
        raise UserError(
            f"{examples} holds {different} different documents, {settings.num_fewshot} examples need {needed}; "
            f"lower --num-fewshot or add documents"
        )
    return 0


def _problems(task: Any, documents: Iterable[dict[str, Any]]) -> dict[int, str]:
    """What keeps each document that cannot be answered from being so, by its index."""
    problems = {}
    for index, document in enumerate(documents):
        try:
            choices = task.doc_to_choice(document)
            answer = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
            task.doc_to_text(document)
        except UNFIT as error:
            problems[index] = f"lm-eval cannot read it ({type(error).__name__}: {error})"
            continue
        answerable = 0 <= answer < len(choices) if isinstance(answer, int) else answer in choices
        if not answerable:
            problems[index] = f"its answer {answer!r} is none of its {len(choices)} choices"
    return problems
