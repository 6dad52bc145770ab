"""Libraries and documents that measuring needs: a study without them is refused at its start."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from base.errors import UserError
from quant_eval.paper_tasks import PAPER_TASKS
from quant_eval.specs import parse_spec
from study.definition import Study
from study.measurements.tasks import TasksSettings

OFFLINE = {"1", "ON", "YES", "TRUE"}  # of HF_HUB_OFFLINE, as huggingface_hub reads it


def check_measurable(study: Study) -> None:
    """Raise UserError where a library is not installed, or documents of tasks are out of reach."""
    for spec in study.measured_specs:
        library = parse_spec(spec).library
        if library != "quantdyn" and not _is_installed(library):
            raise UserError(
                f"spec {spec} is by {library}, which is not installed; install it, or leave the"
                " spec out"
            )
    if study.tasks:
        _check_documents(study.tasks)


def _is_installed(library: str) -> bool:
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True


def _check_documents(settings: TasksSettings) -> None:
    """Look for local files of tasks, or without a network for those of the hub's local cache.

    The hub itself is asked when the first model is.
    """
    if settings.task_files:
        for task in settings.names:
            place = settings.task_files / (task if task == "mmlu" else f"{task}.jsonl")
            if not place.exists():
                raise UserError(
                    f"{place} does not exist; put the documents of {task} there, or leave it out of"
                    " tasks.tasks"
                )
    elif os.environ.get("HF_HUB_OFFLINE", "").upper() in OFFLINE:
        for task in settings.names:
            if not _is_cached(PAPER_TASKS[task].dataset):
                raise UserError(
                    f"the documents of {task} are on the Hugging Face hub, and HF_HUB_OFFLINE is"
                    " set, but they are not cached; unset it, give --set tasks.task_files=DIR, or"
                    " --set tasks=null"
                )


def _is_cached(dataset: str) -> bool:
    """Return whether a dataset OWNER/NAME was loaded before, in any configuration."""
    from datasets import config  # takes seconds

    # Directories there are OWNER___NAME, with a capital letter as _ and a small one.
    name = _plain(dataset.replace("/", "___"))
    cache = Path(config.HF_DATASETS_CACHE)
    return any(_plain(directory.name) == name for directory in cache.glob("*___*"))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
