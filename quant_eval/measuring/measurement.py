"""The content of result.json, made from an HF directory and specs."""

import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from base.environment import environment
from base.errors import UserError
from base.files import committed_directory
from base.ranks import Ranks
from base.statistics import INTERVAL_LEVEL
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.directory import DENSE_JSON
from ckpt_tools.hf.model import identify
from quant_eval.libraries.job import library_model
from quant_eval.measuring.dense import DenseWriter
from quant_eval.measuring.losses import EvaluationSet, PairedLosses, paired_losses
from quant_eval.measuring.sequential import check_spec
from quant_eval.measuring.statistics import SAMPLES, UNITS, figures_of
from quant_eval.measuring.streams import evaluated_stream
from quant_eval.measuring.texts import Texts, open_texts
from quant_eval.measuring.walk import Finished, Quantized, Variant, walk
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.quantizer import QuantSpec
from quant_eval.quantizers import described
from quant_eval.saved.checkpoint import CheckpointWriter, SavedWeights
from quant_eval.settings import CHECKPOINT, ComputeSettings, RunSettings
from train.model.families import ARCHITECTURES

DRAWN = ("nll_quantized", "kl", "agreements")  # sums by document that a calibration draw moves
LIBRARY_WORK = "library"  # below a result's directory while another project's library is at work
RELOADED_TOLERANCE = 1e-6  # the same weights by the same code


def measure(
    hf_dir: Path,
    specs: Sequence[QuantSpec],
    outs: Sequence[Path],
    settings: RunSettings,
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """Return the content of one result.json per spec.

    All specs share one load, the calibration draws and the full-precision pass. Both models of a
    pair run in the same dtype, with the same attention and on the same batches.

    `outs` are the directories of the results; files of other projects' libraries, the saved
    checkpoint and the dense weights go there too. UserError if the input does not allow the
    measurement, or a loss is not finite.
    """
    # Hashing reads every weight; only the first rank writes what needs it.
    identity = identify(hf_dir, ARCHITECTURES) if ranks.rank == 0 else {}
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[settings.dtype], ranks.device)
    texts = open_texts(hf_dir, model, settings.of_specs(specs))
    _check(model, specs, settings)
    quantized, dense = _quantize(hf_dir, specs, outs, settings, identity, model, texts, ranks)

    # one result.json per spec
    here, results = environment(), []
    for number, (spec, out) in enumerate(zip(specs, outs, strict=True)):
        of_draws = quantized[number]
        measured = summarize(spec, of_draws, settings, texts.data)
        # With --save a calibrated spec has one draw alone (`_check`).
        losses, report = of_draws[0].losses, of_draws[0].report
        if settings.save and losses:
            on_device = of_draws[0].room.on_device
            measured["reloaded"] = prove_saved(
                out / CHECKPOINT, losses, texts.data, settings, on_device, ranks
            )
        if dense:
            measured["dense"] = dense[number]

        content = {"name": spec.name} | described(spec) | {"library": spec.library}
        if report:
            content |= {"library_settings": report.settings, "library_version": report.version}
        content |= texts.described_for(spec) | {
            "dtype": settings.dtype,
            "attention": "sdpa",
            "batch_size": settings.batch_size,
            "device": settings.device,
            "ranks": ranks.size,
            "streams": asdict(of_draws[0].room),
        }
        results.append(
            {"model": identity, "spec": content, "measured": measured, "environment": here}
        )
    return results


def _quantize(
    hf_dir: Path,
    specs: Sequence[QuantSpec],
    outs: Sequence[Path],
    settings: RunSettings,
    identity: dict[str, Any],
    model: StreamedModel,
    texts: Texts,
    ranks: Ranks,
) -> tuple[list[list[Quantized]], list[str]]:
    """Walk through the model for all specs and draws, and write checkpoints and dense weights.

    Returns:
        The quantized models of each spec, one for each draw, and the hash of its dense.json if
        dense weights were asked for.
    """
    variants, savers = list[Variant](), list[CheckpointWriter]()
    keepers: list[DenseWriter] = []
    if settings.save:  # refused on every rank alike
        savers = [
            CheckpointWriter(hf_dir, out / CHECKPOINT, spec, settings.dtype)
            for spec, out in zip(specs, outs, strict=True)
        ]

    with ExitStack() as cleanup:
        # one variant per spec and draw, with what its blocks are handed to
        for number, (spec, out) in enumerate(zip(specs, outs, strict=True)):
            keep, takers = None, list[Finished]()
            if ranks.rank == 0:  # it alone writes
                if settings.save:
                    saver = cleanup.enter_context(savers[number].collecting())
                    keep = saver.add
                    takers.append(saver.add_block)
                if settings.dense:
                    directory = cleanup.enter_context(
                        committed_directory((out / DENSE_JSON).parent)
                    )
                    keepers.append(DenseWriter(hf_dir, directory, spec, settings.dtype))
                    takers.append(keepers[number].add)
            finished = partial(_hand_to, takers) if takers else None
            for draw, sequences in enumerate(texts.draws_for(spec)):
                work = out / LIBRARY_WORK  # of one draw after the other
                library = library_model(hf_dir, spec, sequences, settings, work, ranks)
                seed, by_block = settings.seed + draw, settings.per_block
                variants.append(Variant(spec, sequences, library, keep, finished, by_block, seed))

        # Variants are in the order of specs and, within each, of draws.
        walked = iter(walk(model, variants, texts.data, settings, ranks))
        quantized = [[next(walked) for _ in texts.draws_for(spec)] for spec in specs]

        # the files that vouch for the others, last
        if settings.save and ranks.rank == 0:
            for spec, saver in zip(specs, savers, strict=True):
                saver.finish({"model": identity} | texts.described_for(spec))
        dense = [keeper.finish(identity["weights_digests"]) for keeper in keepers]
        # No rank opens a checkpoint before the first has committed it.
        ranks.wait()
    return quantized, dense


def _hand_to(takers: Sequence[Finished], index: int, block: Block) -> None:
    for take in takers:
        take(index, block)


def _check(model: StreamedModel, specs: Sequence[QuantSpec], settings: RunSettings) -> None:
    """Refuse what cannot be done, before a library works for an hour."""
    keeps_one = (settings.save or settings.dense) and settings.calibration_seeds > 1
    for spec in specs:
        if keeps_one and spec.needs_calibration:
            raise UserError(
                "--save and --dense keep the weights of one calibration draw; leave"
                " --calibration-seeds out"
            )
        if settings.dense and spec.casts:
            raise UserError(
                f"{spec.name} rounds more than weights, no weights alone reproduce it; leave"
                " --dense out"
            )
        check_spec(model, spec)


def summarize(
    spec: QuantSpec, quantized: list[Quantized], settings: RunSettings, data: EvaluationSet
) -> dict[str, Any]:
    """Return the `measured` part of a result, from one quantized model per calibration draw."""
    # refuse losses that are not finite, or that nothing can be relative to
    losses = [draw.losses for draw in quantized if draw.losses]
    for draw in losses:
        for name, values_U in asdict(draw).items():
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
        return figures_of(some, samples=SAMPLES, level=INTERVAL_LEVEL, seed=settings.seed)

    summary = figures(losses)
    # There the units are blocks of the joined text, which `figures_of` does not know.
    if settings.documents == "concatenated":
        interval = summary["interval"]
        interval["units_resampled"] = interval["units_resampled"].replace("documents", "blocks")

    # all draws together, document by document
    measured = {
        **summary,
        "tokens": int(losses[0].tokens.sum()),
        "documents": len(data.documents),
        "documents_without_target": data.without_target,
        "units": UNITS,
        "layers": _layers(quantized),
        "per_document": {
            "document": data.documents,
            "tokens": losses[0].tokens.astype(int).tolist(),
            "nll": losses[0].nll.tolist(),
            **{
                name: np.mean([getattr(draw, name) for draw in losses], axis=0).tolist()
                for name in DRAWN
            },
        },
    }

    # only with several draws, or block by block
    if measured["calibration"]:
        measured["calibration"]["per_document"] = {
            name: [getattr(draw, name).tolist() for draw in losses] for name in DRAWN
        }
    if quantized[0].alone:
        measured["units"] = UNITS | {"blocks": "those of the figures"}
        measured["blocks"] = [
            {
                "block": block,
                "alone": _increase(figures([draw.alone[block] for draw in quantized])),
                "all_but_it": _increase(figures([draw.others[block] for draw in quantized])),
            }
            for block in range(len(quantized[0].alone))
        ]
    return measured


def _layers(quantized: list[Quantized]) -> list[dict[str, Any]]:
    """Return the errors of every linear in the first draw; dead are those that are so in any."""
    return [
        of_draws[0].model_dump() | {"dead": any(error.dead for error in of_draws)}
        for of_draws in zip(*(draw.errors for draw in quantized), strict=True)
    ]


def _increase(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that a result has of a partly quantized model."""
    names = ("absolute_error", "kl_divergence")
    return {name: figures[name] for name in names} | {
        "intervals": {name: figures["intervals"][name] for name in names}
    }


def prove_saved(
    checkpoint: Path,
    measured: PairedLosses,
    data: EvaluationSet,
    compute: ComputeSettings,
    on_device: bool,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the cross-entropy of the checkpoint, and its difference from the measured one.

    The evaluated text is kept where the walk kept it: see `Room.on_device`. UserError if the loss
    is not reproduced; the checkpoint is removed.
    """
    # the evaluated text through the saved model, block by block
    dtype = DTYPES[compute.dtype]
    weights = SavedWeights(checkpoint, dtype)
    model = StreamedModel(checkpoint, weights, dtype, ranks.device)
    share = data.batches(compute.batch_size)[ranks.rank :: ranks.size]
    stream = evaluated_stream(model, data, share, on_device)
    for index in range(model.num_blocks):
        block = model.block(index)
        weights.restore(block)
        stream.advance(block)

    # its losses, once alone: it is both models of the pair
    final = stream.activations
    (losses,) = paired_losses(model.head(), final, [final], data, share, ranks)
    reloaded, expected = float(losses.nll.sum()), float(measured.nll_quantized.sum())
    difference = abs(reloaded / expected - 1)
    report = {
        "cross_entropy": reloaded / float(losses.tokens.sum()),
        "relative_difference": difference,
        "tolerance": RELOADED_TOLERANCE,
    }

    # every rank has read the files before they are removed
    ranks.wait()
    if not difference <= RELOADED_TOLERANCE:  # nor NaN
        if ranks.rank == 0:
            shutil.rmtree(checkpoint)
        raise UserError(
            f"{checkpoint} does not reproduce the measured loss ({report}) and was removed; report"
            " this as a defect"
        )
    return report
