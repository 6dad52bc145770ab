"""From an HF directory, specs and tasks to the content of result.json."""

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf_model import identify, load_hf_model
from quant_eval.families import ARCHITECTURES
from quant_eval.settings import CalibrationSettings
from quant_eval.specs import QuantSpec
from quant_eval.tasks.loading import LoadedTask, load_tasks
from quant_eval.tasks.paired import compare
from quant_eval.tasks.scoring import SOFTMAX_DTYPE, evaluate_tasks
from quant_eval.tasks.settings import TaskSettings
from quant_eval.texts import describe, open_text
from train.command import UserError
from train.gpus import refuse_cuda
from train.tracking import environment


def measure_tasks(
    full: PreTrainedModel, quantized: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: TaskSettings
) -> dict[str, Any]:
    """The `measured` part of a result for two models at hand.

    Raises:
        UserError: a document is missing or unfit, or a model cannot be asked it.
    """
    tasks = load_tasks(settings)
    ours = evaluate_tasks(full, tokenizer, tasks, settings, "tasks, full")
    theirs = evaluate_tasks(quantized, tokenizer, tasks, settings, "tasks, quantized")
    return compare(ours, theirs, tasks, settings)


def measure(
    hf_dir: Path,
    specs: Sequence[QuantSpec],
    calibration: CalibrationSettings,
    tasks: Sequence[LoadedTask],
    settings: TaskSettings,
) -> Iterator[dict[str, Any]]:
    """The content of result.json for each spec, as soon as it is known. The full-precision model is asked once.

    One model is in memory at a time.

    Raises:
        UserError: the input does not allow the measurement.
    """
    from quant_eval.quantized import quantized_model

    here = environment()
    compute = settings.compute
    if compute.device == "cuda" and not torch.cuda.is_available():
        refuse_cuda()
    model = identify(hf_dir, ARCHITECTURES)
    full: Any = load_hf_model(hf_dir, DTYPES[compute.dtype], "sdpa", ARCHITECTURES)
    tokenizer = _tokenizer(hf_dir, full.config.vocab_size)
    described = describe(open_text(calibration.prefix, hf_dir, full.config.vocab_size))
    shared = _shared(described, calibration, tasks, settings)
    full_answers = evaluate_tasks(full.to(compute.device), tokenizer, tasks, settings, "tasks, full")
    del full
    for spec in specs:
        quantized = quantized_model(hf_dir, spec, calibration, compute)
        answers = evaluate_tasks(quantized, tokenizer, tasks, settings, f"tasks, {spec.name}")
        del quantized
        yield {
            "model": model,
            "spec": {"name": spec.name} | spec.model_dump(mode="json") | shared,
            "measured": compare(full_answers, answers, tasks, settings),
            "environment": here,
        }


def _shared(
    described: dict[str, Any], calibration: CalibrationSettings, tasks: Sequence[LoadedTask], settings: TaskSettings
) -> dict[str, Any]:
    """Everything that decides the figures besides the model and the spec."""
    return {
        "calibration": described | calibration.model_dump(mode="json", exclude={"prefix", "seeds"}),
        "tasks": {task.name: task.source for task in tasks},
        "metric": "acc",
        "num_fewshot": settings.num_fewshot,
        "limit": settings.limit,
        "seed": settings.seed,
        "dtype": settings.compute.dtype,
        "softmax_dtype": SOFTMAX_DTYPE,
        "attention": "sdpa",
        "batch_size": settings.compute.batch_size,
        "device": settings.compute.device,
        "libraries": {package: metadata.version(package) for package in ("lm-eval", "datasets", "transformers")},
    }


def _tokenizer(hf_dir: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model; UserError if there is none, or one for another vocabulary."""
    if not (hf_dir / "tokenizer.json").exists():
        raise UserError(f"{hf_dir} holds no tokenizer.json; copy the tokenizer the model was trained with there")
    tokenizer = AutoTokenizer.from_pretrained(hf_dir, local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise UserError(f"{hf_dir}: its tokenizer has no end-of-text token; name one in tokenizer_config.json")
    if len(tokenizer) > vocab_size:
        raise UserError(
            f"{hf_dir}: its tokenizer has {len(tokenizer)} tokens, the model {vocab_size}; copy the model's own there"
        )
    return tokenizer
