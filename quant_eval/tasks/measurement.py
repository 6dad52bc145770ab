"""The content of result.json, made from an HF directory, specs and tasks."""

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from base.environment import environment
from base.errors import UserError
from base.ranks import start
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import identify, load_hf_model
from quant_eval.bos import bos_of
from quant_eval.libraries.job import library_model
from quant_eval.measuring.measurement import LIBRARY_WORK
from quant_eval.measuring.sequential import check_spec
from quant_eval.measuring.texts import calibration_draw, open_text
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.quantizer import QuantSpec
from quant_eval.quantizers import described
from quant_eval.settings import CalibrationSettings, TaskSettings
from quant_eval.tasks.loading import LoadedTask
from quant_eval.tasks.paired import compare
from quant_eval.tasks.scoring import SOFTMAX_DTYPE, evaluate_tasks
from train.model.families import ARCHITECTURES, LAYERS

LIBRARIES = ("lm-eval", "datasets", "transformers")


def measure(
    hf_dir: Path, specs: Sequence[QuantSpec], tasks: Sequence[LoadedTask], settings: TaskSettings
) -> Iterator[dict[str, Any]]:
    """Yield the content of each spec's result.json as soon as it is measured.

    The full-precision model is asked once. One model is in memory at a time. Ranks share the
    requests, and every one of them yields.
    """
    here = environment()
    ranks = start(settings.device)
    model = identify(hf_dir, ARCHITECTURES) if ranks.rank == 0 else {}
    full: Any = load_hf_model(hf_dir, DTYPES[settings.dtype], "sdpa", ARCHITECTURES)
    tokenizer = _tokenizer(hf_dir, full.config.vocab_size)
    bos = bos_of(hf_dir, settings.bos)
    sha256 = None
    if settings.calibration:
        text = open_text(settings.calibration, hf_dir, full.config.vocab_size)
        sha256 = text.manifest.sha256

    # settings that the results of all specs share
    shared = {
        "tasks": {task.name: task.source for task in tasks},
        "bos_token_ids": list(bos),
        "metric": "acc",
        "dtype": settings.dtype,
        "softmax_dtype": SOFTMAX_DTYPE,
        "attention": "sdpa",
        "device": settings.device,
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
    }

    # the full-precision answers first: one model is in memory at a time
    full.to(ranks.device)
    full_answers = evaluate_tasks(full, tokenizer, tasks, settings, "tasks, full", ranks)
    del full

    for spec in specs:
        quantized, dead = quantized_model(hf_dir, spec, settings, bos)
        label = f"tasks, {spec.name}"

        # LLM.int8() mixes the sequences of a batch, and their padding.
        size = 1 if spec.casts_inputs else settings.batch_size
        batched = settings.model_copy(update={"batch_size": size})
        answers = evaluate_tasks(quantized, tokenizer, tasks, batched, label, ranks)
        del quantized
        yield {
            "model": model,
            "spec": {
                "name": spec.name,
                **described(spec),
                **settings.of_specs([spec]).described(sha256),
                **shared,
                "batch_size": size,
            },
            "measured": compare(full_answers, answers, tasks, settings.seed)
            | {"dead_linears": dead},
            "environment": here,
        }


def _tokenizer(hf_dir: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the model.

    UserError if there is none that fits.
    """
    if not (hf_dir / "tokenizer.json").exists():
        raise UserError(
            f"{hf_dir} holds no tokenizer.json; copy the tokenizer the model was trained with there"
        )
    tokenizer = AutoTokenizer.from_pretrained(
        hf_dir, local_files_only=True, trust_remote_code=False
    )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise UserError(
            f"{hf_dir}: its tokenizer has tokens up to {largest}, the model {vocab_size} of them;"
            " copy the model's own there"
        )
    return tokenizer


def quantized_model(
    hf_dir: Path, spec: QuantSpec, settings: CalibrationSettings, bos: tuple[int, ...]
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model with its decoder blocks quantized on the first calibration draw.

    With it the names of the linears that read zeros alone on that text. `bos` begins each
    calibration sequence.

    Weights are dense, dequantized ones in the given dtype; for LLM.int8() the linears are
    bitsandbytes' own modules.
    """
    ranks = start(settings.device)
    full: Any = load_hf_model(hf_dir, DTYPES[settings.dtype], "sdpa", ARCHITECTURES)
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[settings.dtype], ranks.device)
    check_spec(model, spec)
    draw, calibration = None, settings.of_specs([spec]).calibration
    if calibration:
        corpus = open_text(calibration, hf_dir, model.config.vocab_size)
        draw = calibration_draw(corpus, settings, model, 0, bos)
    layers = getattr(getattr(full, model.family.decoder), LAYERS)

    def keep(index: int, block: Block) -> None:
        # The model that lm-eval asks gets each block as soon as it is quantized.
        layers[index] = block.module

    work = hf_dir / "tasks" / spec.name / LIBRARY_WORK  # where all ranks see it
    library = library_model(hf_dir, spec, draw, settings, work, ranks)
    (walked,) = walk(
        model,
        [Variant(spec, draw, library, finished=keep, seed=settings.seed)],
        None,
        settings,
        ranks,
    )
    return full.to(ranks.device), [error.name for error in walked.errors if error.dead]
