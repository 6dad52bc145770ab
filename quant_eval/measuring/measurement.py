"""The content of result.json, made from an HF directory and specs."""

import math
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.environment import environment
from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import identify
from quant_eval.gptq_format.writer import CheckpointWriter
from quant_eval.libraries.job import Report
from quant_eval.measuring.dense import DenseWriter, check_dense, dense_writers
from quant_eval.measuring.library import library_model
from quant_eval.measuring.losses import EvaluationSet, PairedLosses
from quant_eval.measuring.saving import prove_saved
from quant_eval.measuring.sequential import check_groups
from quant_eval.measuring.statistics import LEVEL, SAMPLES, UNITS, figures_of
from quant_eval.measuring.texts import Texts, open_texts
from quant_eval.measuring.walk import Quantized, Variant, walk
from quant_eval.model.families import ARCHITECTURES
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import CHECKPOINT, RunSettings
from quant_eval.specs import QuantSpec

LIBRARY_WORK = "library"  # below a result's directory while another project's library is at work


@dataclass(frozen=True)
class Request:
    """One model and what is to be measured of it.

    Attributes:
        specs: how it is quantized.
        outs: for each spec, the directory of its result; files of other projects' libraries, the
            saved checkpoint and the dense weights go there too.
    """

    hf_dir: Path
    specs: tuple[QuantSpec, ...]
    outs: tuple[Path, ...]
    settings: RunSettings


def measure(request: Request, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the content of one result.json per spec.

    All specs share one load, the calibration draws and the full-precision pass. Both models of a
    pair run in the same dtype, with the same attention and on the same batches.

    Raises:
        UserError: the input does not allow the measurement, or a loss is not finite.
    """
    hf_dir, settings = request.hf_dir, request.settings
    identity = identify(hf_dir, ARCHITECTURES) if ranks.rank == 0 else {}
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[settings.dtype], ranks.device)
    texts = open_texts(hf_dir, model, settings)
    _check(request, model)
    made = _quantize(request, identity, model, texts, ranks)
    shared = texts.described | {
        "dtype": settings.dtype,
        "attention": "sdpa",
        "batch_size": settings.batch_size,
        "device": settings.device,
        "ranks": ranks.size,
    }
    here, draws, results = environment(), len(texts.draws), []
    for number, (spec, out) in enumerate(zip(request.specs, request.outs, strict=True)):
        of_draws = made.quantized[number * draws : (number + 1) * draws]
        measured = summarize(spec, of_draws, settings, texts.data)
        losses = of_draws[0].losses
        if settings.save and losses:
            checkpoint = out / CHECKPOINT
            measured["reloaded"] = prove_saved(checkpoint, losses, texts.data, settings, ranks)
        if made.dense:
            measured["dense"] = made.dense[number].sha256
        described = _described(spec, made.reports[number * draws]) | shared
        results.append(
            {"model": identity, "spec": described, "measured": measured, "environment": here}
        )
    return results


def _check(request: Request, model: StreamedModel) -> None:
    """Refuse what cannot be done, before a library works for an hour."""
    settings = request.settings
    if settings.save and settings.calibration_seeds > 1:
        raise UserError("--save saves one calibration draw; leave --calibration-seeds out")
    if settings.dense:
        check_dense(request.specs, settings.calibration_seeds)
    for spec in request.specs:
        check_groups(model, spec)


class _Made(NamedTuple):
    """The quantized models, draw by draw of each spec, and what wrote their weights."""

    quantized: list[Quantized]
    reports: list[Report | None]
    dense: list[DenseWriter]


def _quantize(
    request: Request, identity: dict[str, Any], model: StreamedModel, texts: Texts, ranks: Ranks
) -> _Made:
    """Walk through the model for all specs and draws; what is to be saved of them is written."""
    hf_dir, specs, outs, settings = request.hf_dir, request.specs, request.outs, request.settings
    savers: list[CheckpointWriter] = []
    keepers: list[DenseWriter] = []
    if settings.save:  # refused on every rank alike
        savers = [
            CheckpointWriter(hf_dir, out / CHECKPOINT, spec, settings.dtype)
            for spec, out in zip(specs, outs, strict=True)
        ]
    with ExitStack() as cleanup:
        cleanup.callback(_remove, [out / LIBRARY_WORK for out in outs], ranks)
        if ranks.rank == 0:  # it alone writes
            for saver in savers:
                cleanup.enter_context(saver)
            if settings.dense:
                keepers = cleanup.enter_context(
                    dense_writers(hf_dir, specs, outs, settings.dtype, identity["weights_sha256"])
                )
        variants, reports = [], []
        for number, (spec, out) in enumerate(zip(specs, outs, strict=True)):
            keep = savers[number].add if savers and ranks.rank == 0 else None
            finished = keepers[number].add if keepers else None
            for draw, draw_NL in enumerate(texts.draws):
                work = out / LIBRARY_WORK / str(draw)
                given, report = library_model(hf_dir, spec, draw_NL, settings, work, ranks)
                variants.append(Variant(spec, draw_NL, given, keep, finished, settings.per_block))
                reports.append(report)
        quantized = walk(model, variants, texts.data, settings, ranks)
        for saver in savers if ranks.rank == 0 else []:
            saver.finish({"model": identity} | texts.described)
        ranks.wait()
    return _Made(quantized, reports, keepers)


def _described(spec: QuantSpec, report: Report | None) -> dict[str, Any]:
    """Return what a result says of its spec, and of the library that quantized by it."""
    described = {"name": spec.name} | spec.model_dump(mode="json") | {"library": spec.row.library}
    if report is None:
        return described
    return described | {"library_settings": report.settings, "library_version": report.version}


def _remove(works: list[Path], ranks: Ranks) -> None:
    for work in works if ranks.rank == 0 else []:
        shutil.rmtree(work, ignore_errors=True)


def summarize(
    spec: QuantSpec, quantized: list[Quantized], settings: RunSettings, data: EvaluationSet
) -> dict[str, Any]:
    """Return the `measured` part of a result, from one quantized model per calibration draw.

    Raises:
        UserError: a loss is not finite or there is nothing to divide by.
    """
    losses = [one.losses for one in quantized if one.losses]
    for one in losses:
        for name, values_U in asdict(one).items():
            if not math.isfinite(float(values_U.sum())):
                raise UserError(
                    f"{name} of {spec.name} sums to {values_U.sum()}; check the checkpoint's"
                    " weights for overflow"
                )
    if losses[0].nll.sum() <= 0:
        raise UserError(
            "the full-precision model's loss is 0, nothing is relative to it; evaluate on other"
            " text"
        )

    def figures(some: list[PairedLosses]) -> dict[str, Any]:
        return figures_of(some, samples=SAMPLES, level=LEVEL, seed=settings.seed)

    whole = figures(losses)
    if settings.documents == "concatenated":
        whole["interval"]["units_resampled"] = whole["interval"]["units_resampled"].replace(
            "documents", "blocks"
        )
    measured = {
        **whole,
        "tokens": int(losses[0].tokens.sum()),
        "documents": len(data.documents),
        "documents_without_target": data.without_target,
        "units": UNITS,
        "layers": [asdict(error) for error in quantized[0].errors],
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
    if quantized[0].alone:
        measured["units"] = UNITS | {"blocks": "those of the figures"}
        measured["blocks"] = [
            {
                "block": block,
                "alone": _increase(figures([one.alone[block] for one in quantized])),
                "all_but_it": _increase(figures([one.others[block] for one in quantized])),
            }
            for block in range(len(quantized[0].alone))
        ]
    return measured


def _increase(figures: dict[str, Any]) -> dict[str, Any]:
    """Return those figures that are kept of a partly quantized model."""
    kept = ("absolute_error", "kl_divergence")
    return {name: figures[name] for name in kept} | {
        "intervals": {name: figures["intervals"][name] for name in kept}
    }
