"""Datasets of the Hugging Face hub at one recorded revision, or from its local cache."""

from typing import Any

import httpx
from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import HfApi, constants

from base.errors import UserError
from quant_eval.tasks.table import PaperTask

TIMEOUT_SECONDS = 30.0


def hub_revision(task: PaperTask) -> str | None:
    """Return the commit of the task's dataset; None with HF_HUB_OFFLINE set.

    Asked once and without repetition: the dataset's own loader repeats for half a minute where
    there is no network.

    Raises:
        UserError: the hub cannot be reached or has no such dataset.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(task.dataset, timeout=TIMEOUT_SECONDS).sha
    except (httpx.HTTPError, OSError) as error:
        raise _missing(task, error) from None


def hub_splits(task: PaperTask, config: str | None, revision: str | None) -> DatasetDict:
    """All splits of one configuration of the task's dataset.

    Raises:
        UserError: it cannot be had.
    """
    try:
        splits: Any = load_dataset(task.dataset, config, revision=revision)
    except (DatasetsError, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise _missing(task, error) from None
    # its one split, the labelled items, does not mark those that the authors test on
    return DatasetDict({task.evaluated: splits["train"]}) if task.name == "pubmedqa" else splits


def _missing(task: PaperTask, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    where = f"{task.name}/SUBJECT.jsonl" if task.name == "mmlu" else f"{task.name}.jsonl"
    return UserError(
        f"dataset {task.dataset} of task {task.name} cannot be loaded ({reason:.200}); connect to"
        " the network, set HF_HUB_OFFLINE=1 if it is cached, or give local documents: --task-files"
        f" DIR with DIR/{where}"
    )
