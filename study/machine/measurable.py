"""Libraries and documents that measuring needs: a study without them is refused at its start."""

import os
from importlib.metadata import PackageNotFoundError, version

from base.errors import UserError
from quant_eval.specs import parse_spec
from study.definition import Study
from study.measurements.tasks import TasksSettings


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
    """Look for local files of tasks; those of the hub are asked for when the first model is."""
    if settings.task_files:
        for task in settings.names:
            place = settings.task_files / (task if task == "mmlu" else f"{task}.jsonl")
            if not place.exists():
                raise UserError(
                    f"{place} does not exist; put the documents of {task} there, or leave it out of"
                    " tasks.tasks"
                )
    elif os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise UserError(
            f"the documents of {settings.names[0]} are on the Hugging Face hub, and HF_HUB_OFFLINE"
            " is set; unset it, give --set tasks.task_files=DIR, or --set tasks=null"
        )
