"""From an HF directory and specs to the content of result.json."""

import math
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf_model import identify
from ckpt_tools.ranks import Ranks
from quant_eval.dense import DenseWriter, check_dense, dense_weights
from quant_eval.families import ARCHITECTURES
from quant_eval.gptq_format.writer import CheckpointWriter
from quant_eval.libraries.job import MODULES, REPORT, WEIGHTS, Job, Report, run_job
from quant_eval.losses import EvaluationSet, PairedLosses, evaluation_set
from quant_eval.saving import CHECKPOINT, prove_saved
from quant_eval.settings import CalibrationSettings, ComputeSettings, EvaluationSettings
from quant_eval.specs import QuantSpec
from quant_eval.statistics import UNITS, figures_of
from quant_eval.streamed import StreamedModel
from quant_eval.texts import block_length, calibration_draw, check_apart, check_tokens, describe, open_text
from quant_eval.walk import Overlaid, Variant, walk
from train.command import UserError
from train.corpus import Corpus
from train.tracking import environment

LIBRARY_WORK = "library"  # below a result's directory while another project's library is at work


class Texts(NamedTuple):
    """What one model is calibrated and evaluated on, and how a result describes it."""

    draws: list[Tensor]
    data: EvaluationSet
    described: dict[str, Any]


def open_texts(
    hf_dir: Path, model: StreamedModel, calibration: CalibrationSettings, evaluation: EvaluationSettings
) -> Texts:
    """Opens and checks both texts; UserError if they do not fit the model or each other."""
    config = model.config
    first, second = (open_text(one.prefix, hf_dir, config.vocab_size) for one in (calibration, evaluation))
    draws = calibration_draws(first, model, calibration)
    length = block_length(evaluation.sequence_length, config)
    data = evaluation_set(second, length, evaluation.max_tokens, evaluation.documents)
    shared = check_apart(first, draws, second, data)
    described = {
        "calibration": describe(first)
        | {"sequences": calibration.sequences, "sequence_length": draws[0].shape[1]}
        | {"seed": calibration.seed, "seeds": calibration.seeds},
        "evaluation": describe(second)
        | {"sequence_length": length, "max_tokens": evaluation.max_tokens, "documents": evaluation.documents}
        | {"windows_in_calibration": shared},
    }
    return Texts(draws, data, described)


def calibration_draws(corpus: Corpus, model: StreamedModel, settings: CalibrationSettings) -> list[Tensor]:
    """The token ids of every draw, int64 [N, L]."""
    length = block_length(settings.sequence_length, model.config)
    draws = [calibration_draw(corpus, settings, length, draw, model.config) for draw in range(settings.seeds)]
    check_tokens(draws[0], {name: linear.in_features for name, linear in model.empty_linears().items()})
    return draws


def library_model(
    hf_dir: Path, spec: QuantSpec, draw_NL: Tensor, compute: ComputeSettings, work: Path, ranks: Ranks
) -> tuple[StreamedModel, Report]:
    """The model as another project's library quantizes it; rank 0 runs the library, in a process of its own.

    `work` is a directory that all ranks see; the weights in it are read until the model is done with.
    """
    if ranks.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        save_file({"input_ids": draw_NL}, work / "calibration.safetensors")
        job = Job(
            hf_dir=hf_dir,
            spec=spec,
            calibration=work / "calibration.safetensors",
            dtype=compute.dtype,
            batch_size=compute.batch_size,
            threads=torch.get_num_threads(),
            out=work / "out",
        )
        run_job(job)
    ranks.wait()
    report = Report.model_validate_json((work / "out" / REPORT).read_text())
    weights = Overlaid(HFWeights(hf_dir), work / "out" / WEIGHTS)
    return StreamedModel(hf_dir, weights, DTYPES[compute.dtype], ranks.device), report


def measure(
    hf_dir: Path,
    specs: list[QuantSpec],
    outs: list[Path],
    calibration: CalibrationSettings,
    evaluation: EvaluationSettings,
    compute: ComputeSettings,
    ranks: Ranks,
    by_block: bool = False,
    save: bool = False,
    dense: bool = False,
) -> list[dict[str, Any]]:
    """The content of one result.json per spec. All share one load, the calibration draws and the full-precision pass.

    Both models of a pair run in the same dtype, with the same attention and on the same batches. `outs` is where the
    results belong; files of other projects' libraries lie there meanwhile. With `by_block` each block is also quantized
    alone, and all but it; with `save` a checkpoint in GPTQ's format is left beside each result, proven to have the
    measured loss; with `dense` the dequantized weights.

    Raises:
        UserError: the input does not allow the measurement, or a loss is not finite.
    """
    identity = identify(hf_dir, ARCHITECTURES) if ranks.rank == 0 else {}
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[compute.dtype], ranks.device)
    texts = open_texts(hf_dir, model, calibration, evaluation)
    if save and len(texts.draws) > 1:
        raise UserError("--save saves one calibration draw; leave --calibration-seeds out")
    check_dense(specs if dense else [], len(texts.draws))
    pairs = list(zip(specs, outs, strict=True)) if save else []
    writers = [CheckpointWriter(hf_dir, out / CHECKPOINT, spec, dtype=compute.dtype) for spec, out in pairs]
    variants, reports, kept = [], [], list[DenseWriter]()
    works = [out / LIBRARY_WORK for out in outs]
    with ExitStack() as cleanup:
        cleanup.callback(_remove, works, ranks)
        for spec, work in zip(specs, works, strict=True):
            for number, draw_NL in enumerate(texts.draws):
                given, report = None, None
                if spec.method in MODULES:
                    given, report = library_model(hf_dir, spec, draw_NL, compute, work / str(number), ranks)
                variants.append(Variant(spec, draw_NL, given, by_block=by_block))
                reports.append(report)
        if ranks.rank == 0:
            for writer, variant in zip(writers, variants, strict=save):
                variant.keep = cleanup.enter_context(writer).add
            kept_by = dense_weights(hf_dir, variants, outs, compute.dtype, identity["weights_sha256"])
            kept = cleanup.enter_context(kept_by) if dense else []
        walk(model, variants, texts.data, compute, ranks)
        for writer in writers if ranks.rank == 0 else []:
            writer.finish({"model": identity} | texts.described)
        ranks.wait()
    shared = texts.described | {
        "dtype": compute.dtype,
        "attention": "sdpa",
        "batch_size": compute.batch_size,
        "device": compute.device,
        "ranks": ranks.size,
    }
    here, draws = environment(), len(texts.draws)
    results = []
    for number, spec in enumerate(specs):
        own = slice(number * draws, (number + 1) * draws)
        report = reports[own][0]
        settings = {"library_settings": report.settings, "library_version": report.version} if report else {}
        what = {"name": spec.name} | spec.model_dump(mode="json") | {"library": spec.row.library}
        measured = summarize(variants[own], evaluation, texts.data)
        losses = variants[own][0].losses
        if save and losses:
            measured["reloaded"] = prove_saved(outs[number] / CHECKPOINT, losses, texts.data, compute, ranks)
        measured |= {"dense": kept[number].sha256} if kept else {}
        results.append({"model": identity, "spec": what | settings | shared, "measured": measured, "environment": here})
    return results


def _remove(works: list[Path], ranks: Ranks) -> None:
    for work in works if ranks.rank == 0 else []:
        shutil.rmtree(work, ignore_errors=True)


def summarize(variants: list[Variant], evaluation: EvaluationSettings, data: EvaluationSet) -> dict[str, Any]:
    """The `measured` part of a result, from one variant per calibration draw.

    Raises:
        UserError: a loss is not finite or there is nothing to divide by.
    """
    spec = variants[0].spec
    losses = [variant.losses for variant in variants if variant.losses]
    for one in losses:
        for name, values_U in asdict(one).items():
            if not math.isfinite(float(values_U.sum())):
                raise UserError(
                    f"{name} of {spec.name} sums to {values_U.sum()}; check the checkpoint's weights for overflow"
                )
    if losses[0].nll.sum() <= 0:
        raise UserError("the full-precision model's loss is 0, nothing is relative to it; evaluate on other text")

    def figures(some: list[PairedLosses]) -> dict[str, Any]:
        return figures_of(some, samples=evaluation.bootstrap_samples, level=evaluation.level, seed=evaluation.seed)

    whole = figures(losses)
    if evaluation.documents == "concatenated":
        whole["interval"]["units_resampled"] = whole["interval"]["units_resampled"].replace("documents", "blocks")
    measured = {
        **whole,
        "tokens": int(losses[0].tokens.sum()),
        "documents": len(data.documents),
        "documents_without_target": data.without_target,
        "units": UNITS,
        "layers": [asdict(error) for error in variants[0].errors],
        "per_document": {
            "document": data.documents,
            "tokens": losses[0].tokens.astype(int).tolist(),
            "nll": losses[0].nll.tolist(),
            **{
                name: np.mean([getattr(one, name) for one in losses], axis=0).tolist()
                for name in ("nll_quantized", "kl", "agreements")
            },
        },
    }
    if variants[0].alone:
        measured["units"] = UNITS | {"blocks": "those of the figures"}
        measured["blocks"] = [
            {
                "block": block,
                "alone": _increase(figures([variant.alone[block] for variant in variants])),
                "all_but_it": _increase(figures([variant.others[block] for variant in variants])),
            }
            for block in range(len(variants[0].alone))
        ]
    return measured


def _increase(figures: dict[str, Any]) -> dict[str, Any]:
    """What a block's two figures keep of all of them."""
    kept = ("absolute_error", "kl_divergence")
    return {name: figures[name] for name in kept} | {"intervals": {name: figures["intervals"][name] for name in kept}}
