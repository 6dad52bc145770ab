"""The content of result.json, made from an HF directory, specs and tasks."""

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from base.environment import environment
from base.errors import UserError
from base.gpus import refuse_cuda
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import identify, load_hf_model
from quant_eval.measuring.texts import open_text
from quant_eval.model.families import ARCHITECTURES
from quant_eval.model.quantized import quantized_model
from quant_eval.specs import QuantSpec
from quant_eval.tasks.loading import LoadedTask
from quant_eval.tasks.paired import compare
from quant_eval.tasks.scoring import SOFTMAX_DTYPE, evaluate_tasks
from quant_eval.tasks.settings import TaskSettings

LIBRARIES = ("lm-eval", "datasets", "transformers")


def measure(
    hf_dir: Path,
    specs: Sequence[QuantSpec],
    tasks: Sequence[LoadedTask],
    settings: TaskSettings,
) -> Iterator[dict[str, Any]]:
    """Yield the content of result.json of each spec, as soon as it is known.

    The full-precision model is asked once. One model is in memory at a time.

    Raises:
        UserError: the input does not allow the measurement.
    """
    here = environment()
    if settings.device == "cuda" and not torch.cuda.is_available():
        refuse_cuda()
    model = identify(hf_dir, ARCHITECTURES)
    full: Any = load_hf_model(hf_dir, DTYPES[settings.dtype], "sdpa", ARCHITECTURES)
    tokenizer = _tokenizer(hf_dir, full.config.vocab_size)
    text = open_text(settings.calibration, hf_dir, full.config.vocab_size)
    shared = settings.described(text.manifest.sha256) | {
        "tasks": {task.name: task.source for task in tasks},
        "metric": "acc",
        "dtype": settings.dtype,
        "softmax_dtype": SOFTMAX_DTYPE,
        "attention": "sdpa",
        "batch_size": settings.batch_size,
        "device": settings.device,
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
    }
    full.to(settings.device)
    full_answers = evaluate_tasks(full, tokenizer, tasks, settings, "tasks, full")
    del full
    for spec in specs:
        quantized = quantized_model(hf_dir, spec, settings)
        answers = evaluate_tasks(quantized, tokenizer, tasks, settings, f"tasks, {spec.name}")
        del quantized
        yield {
            "model": model,
            "spec": {"name": spec.name} | spec.model_dump(mode="json") | shared,
            "measured": compare(full_answers, answers, tasks, settings.seed),
            "environment": here,
        }


def _tokenizer(hf_dir: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the model; UserError if there is none that fits."""
    if not (hf_dir / "tokenizer.json").exists():
        raise UserError(
            f"{hf_dir} holds no tokenizer.json; copy the tokenizer the model was trained with there"
        )
    tokenizer = AutoTokenizer.from_pretrained(
        hf_dir, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise UserError(
            f"{hf_dir}: its tokenizer has no end-of-text token; name one in tokenizer_config.json"
        )
    if len(tokenizer) > vocab_size:
        raise UserError(
            f"{hf_dir}: its tokenizer has {len(tokenizer)} tokens, the model {vocab_size}; copy the"
            " model's own there"
        )
    return tokenizer
