"""From an HF directory and specs to the content of result.json."""

import copy
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from ckpt_tools.hf_model import identify, load_hf_model
from quant_eval.losses import EvaluationSet, PairedLosses, evaluation_set, paired_losses
from quant_eval.sequential import LinearError, check_groups, quantize_model
from quant_eval.specs import QuantSpec
from quant_eval.statistics import METHOD, UNITS, bootstrap_intervals, ratios
from train.command import Progress, UserError
from train.corpus import Corpus, check_vocabulary, open_corpus
from train.data import batch
from train.frozen import Frozen
from train.tracking import environment

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Settings(Frozen):
    """Everything besides the spec that decides the numbers."""

    calibration: Path
    evaluation: Path
    calibration_sequences: int = Field(ge=1)
    sequence_length: int | None = Field(ge=1, description="tokens the model sees at once; None: its whole context")
    eval_tokens: int | None = Field(ge=1)
    seed: int = Field(ge=0, lt=2**63)
    batch_size: int = Field(ge=1)
    dtype: Literal["fp32", "bf16"]
    bootstrap_samples: int = Field(ge=1)
    level: float = Field(gt=0, lt=1)


def _corpus(prefix: Path, vocab_size: int) -> Corpus:
    corpus = open_corpus(prefix)
    check_vocabulary(corpus, vocab_size)
    return corpus


def _calibration(corpus: Corpus, settings: Settings, sequence_length: int) -> torch.Tensor:
    """The calibration draw, int64 [N, L]: sequences of the file, none twice; documents are packed."""
    available = corpus.num_sequences(sequence_length)
    if settings.calibration_sequences > available:
        raise UserError(
            f"{corpus.prefix} holds {available} sequences of {sequence_length} tokens, fewer than "
            f"{settings.calibration_sequences}; lower --calibration-sequences or prepare more text"
        )
    size = settings.calibration_sequences
    drawn = batch(corpus, step=1, batch_size=size, sequence_length=sequence_length, seed=settings.seed)
    return torch.from_numpy(drawn[:, :-1].copy())


def _describe(corpus: Corpus) -> dict[str, Any]:
    return {"prefix": str(corpus.prefix), "sha256": corpus.manifest.bin.sha256}


def measure(hf_dir: Path, specs: list[QuantSpec], settings: Settings) -> list[dict[str, Any]]:
    """The content of one result.json per spec. All share one load, one calibration draw and one full-precision run.

    Both models of a pair run in the same dtype, with the same attention and on the same batches.

    Raises:
        UserError: the input does not allow the measurement, or a loss is not finite.
    """
    model = identify(hf_dir)
    full: Any = load_hf_model(hf_dir, DTYPES[settings.dtype], attention="sdpa")
    context = int(full.config.max_position_embeddings)
    sequence_length = settings.sequence_length or context
    if sequence_length > context:
        raise UserError(f"sequence length {sequence_length} exceeds the model's context {context}; shorten it")
    for spec in specs:
        check_groups(full, spec)
    calibration = _corpus(settings.calibration, full.config.vocab_size)
    evaluation = _corpus(settings.evaluation, full.config.vocab_size)
    calibration_NL = _calibration(calibration, settings, sequence_length)
    data = evaluation_set(evaluation, sequence_length, settings.eval_tokens)

    quantized = [copy.deepcopy(full) for _ in specs]
    layers = []
    with Progress("quantize", total=len(specs) * full.config.num_hidden_layers) as progress:
        for one, spec in zip(quantized, specs, strict=True):
            layers.append(quantize_model(one, spec, calibration_NL, settings.batch_size, progress))
    with Progress("evaluate", total=len(data.blocks)) as progress:
        losses = paired_losses(full, quantized, data, settings.batch_size, progress)

    shared = {
        "calibration": _describe(calibration)
        | {"sequences": len(calibration_NL), "sequence_length": sequence_length, "seed": settings.seed},
        "evaluation": _describe(evaluation) | {"sequence_length": sequence_length, "max_tokens": settings.eval_tokens},
        "dtype": settings.dtype,
        "scale_dtype": "fp32",
        "attention": "sdpa",
        "batch_size": settings.batch_size,
    }
    here = environment()
    return [
        {
            "model": model,
            "spec": {"name": spec.name} | spec.model_dump(mode="json") | shared,
            "measured": summarize(spec, settings, data, one, linears),
            "environment": here,
        }
        for spec, one, linears in zip(specs, losses, layers, strict=True)
    ]


def summarize(
    spec: QuantSpec, settings: Settings, data: EvaluationSet, losses: PairedLosses, layers: list[LinearError]
) -> dict[str, Any]:
    """The `measured` part of a result; UserError if a loss is not finite or nothing to divide by."""
    sums = {name: float(values_D.sum()) for name, values_D in asdict(losses).items()}
    agreements = sums.pop("agreements")
    for name, value in sums.items():
        if not math.isfinite(value):
            raise UserError(f"{name} of {spec.name} sums to {value}; check the checkpoint's weights for overflow")
    if sums["nll"] <= 0:
        raise UserError("the full-precision model's loss is 0, nothing is relative to it; evaluate on other text")
    figures = ratios(**sums)
    intervals = bootstrap_intervals(losses, settings.bootstrap_samples, settings.level, settings.seed)
    return {
        **figures,
        "top1_agreement": agreements / sums["tokens"],
        "tokens": int(sums["tokens"]),
        "documents": len(data.documents),
        "documents_without_target": data.without_target,
        "intervals": intervals,
        "interval": {
            "level": settings.level,
            "method": METHOD,
            "samples": settings.bootstrap_samples,
            "seed": settings.seed,
        },
        "units": UNITS,
        "layers": [asdict(linear) for linear in layers],
        "per_document": {
            "document": data.documents,
            "tokens": losses.tokens.astype(int).tolist(),
            "nll": losses.nll.tolist(),
            "nll_quantized": losses.nll_quantized.tolist(),
            "kl": losses.kl.tolist(),
        },
    }
