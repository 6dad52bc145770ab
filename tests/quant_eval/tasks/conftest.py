"""Two random models that answer differently, a tokenizer, and documents of all tasks."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quant_eval.settings import TaskSettings
from quant_eval.tasks.loading import load_tasks
from quant_eval.tasks.paired import compare
from quant_eval.tasks.scoring import evaluate_tasks
from tests.conftest import make_hf_directory
from tests.quant_eval.tasks.task_files import write_task_files


class Pair(NamedTuple):
    full: PreTrainedModel
    quantized: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def long_hf_dir(tmp_path_factory, tokenizer_dir) -> Path:
    """A random OLMo2 whose context holds five examples, with its tokenizer."""
    directory = make_hf_directory(
        tmp_path_factory.mktemp("hf") / "long", max_position_embeddings=1024
    )
    return Path(shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def pair(tmp_path_factory, long_hf_dir) -> Pair:
    """The second model has nothing to do with the first: their answers differ on many items."""
    other = make_hf_directory(
        tmp_path_factory.mktemp("hf") / "other", seed=1, max_position_embeddings=1024
    )
    full, quantized = (
        AutoModelForCausalLM.from_pretrained(directory).eval() for directory in (long_hf_dir, other)
    )
    return Pair(full, quantized, AutoTokenizer.from_pretrained(long_hf_dir))


@pytest.fixture(scope="session")
def task_files(tmp_path_factory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("task_files"))


@pytest.fixture(scope="session")
def settings_of(task_files):
    """`settings_of(tasks, **changes)`: small settings on the local documents."""

    def settings(*tasks, **changes):
        given = {"shots": 5, "task_files": task_files, "seed": 3, "batch_size": 16} | changes
        return TaskSettings(calibration=Path("unused"), tasks=",".join(tasks), **given)

    return settings


@pytest.fixture(scope="session")
def measure_tasks():
    """The `measured` part of a result for two models at hand."""

    def measured(full, quantized, tokenizer, settings):
        tasks = load_tasks(settings)
        ours = evaluate_tasks(full, tokenizer, tasks, settings, "tasks, full")
        theirs = evaluate_tasks(quantized, tokenizer, tasks, settings, "tasks, quantized")
        return compare(ours, theirs, tasks, settings.seed)

    return measured
