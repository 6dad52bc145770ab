"""AWQ (arXiv:2306.00978) by llmcompressor: `python -m ...run_llmcompressor JOB.json`.

AWQ moves scales between layers, so that the original's bits are no measure of what it changed. Each
mapping is tried with random scales before anything is quantized (awq_mappings.py); afterwards every
parameter has to be what the scales chosen make of the original, before the linears are rounded to
grids, which `outcome` checks. Whatever the library warns of is an error. Activations are those of
the full-precision model: llmcompressor does not pass the error of rounded layers on to later ones,
as AWQ's authors do not.

Shapes: O output features, I input features, G groups of them, L tokens of a sequence.
"""

from importlib.metadata import version
from typing import Any

import llmcompressor
import torch
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, forward_quantize
from llmcompressor.entrypoints.oneshot import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from loguru import logger
from pydantic import PrivateAttr
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from base.errors import UserError
from base.libraries.private_names import replace
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model
from quant_eval.draws import described_draw, is_ragged, load_draw
from quant_eval.libraries.awq_mappings import (
    Mappings,
    check_folds,
    check_scaled,
    mappings_for,
    witness,
)
from quant_eval.libraries.job import Job, run_process, write_report
from quant_eval.libraries.outcome import ReportedGrid, block_linears, check_on_grid
from quant_eval.quantizers.libraries import AWQ
from train.model.families import ARCHITECTURES

SCALES = "scales.safetensors"  # of every fold, by the name of the smoothed layer
# Starts of warnings that change nothing.
HARMLESS = ("No accelerator available!", "Disabling tokenizer parallelism")
# The library's own: s = 1, and x^r / w^(1 - r) for 19 ratios r, with x and w the mean sizes of
# inputs and weights.
GRID: dict[str, Any] = {"duo_scaling": True, "n_grid": 20}
PIPELINE: dict[str, Any] = {
    "pipeline": "sequential",
    "sequential_offload_device": "cpu",
    "sequential_prefetch": False,
    # only that of scaled weights rounded to their dtype: the grids come last
    "propagate_error": True,
    "use_loss_mask": False,
    "moe_calibrate_all_experts": False,
    "tie_word_embeddings": True,
    "shuffle_calibration_samples": False,
}


class NotingAWQModifier(AWQModifier):
    """AWQ that keeps its scales, which llmcompressor throws away, and checks its statistics."""

    _num_tokens: int = PrivateAttr(default=0)
    _scales_of: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def _compute_best_scale(self, mapping: Any, *arguments: Any) -> Tensor:
        sum_I, count = self._smooth_activation_stats[mapping.smooth_name]
        if int(count) != self._num_tokens:
            raise UserError(
                f"llmcompressor saw {int(count)} of {self._num_tokens} tokens at"
                f" {mapping.smooth_name}"
            )
        if not bool(sum_I.isfinite().all()):  # it would use 1 where a scale is NaN
            raise UserError(
                f"inputs of {mapping.balance_names[0]} are not finite; check the checkpoint's"
                " weights"
            )
        scales_I: Tensor = super()._compute_best_scale(mapping, *arguments)
        self._scales_of[mapping.smooth_name] = scales_I.cpu()
        return scales_I


def weight_arguments(spec: AWQ) -> QuantizationArgs:
    """Return the spec in llmcompressor's words, every field given.

    Symmetric grids have the scale 2 max|w| / (2^bits - 1), asymmetric ones run from min(w, 0) to
    max(w, 0).
    """
    return QuantizationArgs(
        num_bits=spec.bits,
        type="int",
        symmetric=spec.symmetric,
        strategy="group" if spec.group_size else "channel",
        group_size=spec.group_size,
        block_structure=None,
        dynamic=False,
        actorder=None,
        scale_dtype=None,  # the weights'
        zp_dtype=torch.int8,
        observer="memoryless_minmax",
        observer_kwargs={},
    )


def calibrate(
    model: PreTrainedModel,
    mappings: Mappings,
    linears: list[str],
    weights: QuantizationArgs,
    job: Job,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run AWQ on the model: its weights become the scaled ones, not rounded yet.

    Returns:
        The scales of every fold, fp32 [I], by the name of the smoothed layer, and the settings.

    Raises:
        UserError: the library warned of something, or did not see every token at every fold.
    """
    draw = load_draw(job.calibration)
    batch_size = 1 if is_ragged(draw) else job.batch_size  # sequences of one length make a batch
    warned: list[str] = []
    logger.remove()
    logger.add(lambda message: warned.append(message.record["message"]), level="WARNING")

    # Pins host memory for copies to an accelerator; fails without one, and nothing is offloaded
    # here.
    replace(IntermediatesCache, "pin_memory", lambda *_: None)

    # one mapping per fold and block, by full names
    blocks: Any = model.get_submodule(mappings.blocks)
    layer_mappings = [
        AWQMapping(
            f"{mappings.blocks}.{i}.{fold.smooth}",
            [f"{mappings.blocks}.{i}.{name}" for name in fold.balance],
        )
        for i in range(len(blocks))
        for fold in mappings.folds
    ]
    sequences: Any = [{"input_ids": ids_L} for ids_L in draw]
    awq = NotingAWQModifier(mappings=layer_mappings, offload_device=None, **GRID)
    awq._num_tokens = sum(map(len, draw))
    scheme = QuantizationScheme(targets=linears, weights=weights)
    pipeline = PIPELINE | {
        "batch_size": batch_size,
        "num_calibration_samples": len(draw),
        "sequential_targets": [type(blocks[0]).__name__],
    }
    oneshot(
        model=model,
        processor=object(),  # type: ignore[arg-type]  # never called: the text is tokens already
        recipe=[awq, QuantizationModifier(config_groups={"linears": scheme}, ignore=[])],
        # given a loader, llmcompressor samples nothing itself: every sequence, in order
        dataset=DataLoader(sequences, batch_size=batch_size, shuffle=False, drop_last=False),
        **pipeline,
    )
    remove_dispatch(model)  # plain tensors again, wherever the pipeline kept them

    # what it warned of or left out is an error
    unexpected = [line for line in warned if not line.startswith(HARMLESS)]
    if unexpected:
        raise UserError(f"llmcompressor warned: {unexpected[0]}; choose another method")
    unmatched = {mapping.smooth_layer for mapping in layer_mappings} ^ awq._scales_of.keys()
    if unmatched:
        raise UserError(
            f"llmcompressor did not scale {sorted(unmatched)[0]}; choose another method"
        )

    settings = {
        "compressed_tensors": version("compressed-tensors"),  # which rounds
        "awq": GRID | {"offload_device": None},
        "weights": weights.model_dump(mode="json"),
        "pipeline": pipeline,
        "attention": "eager",  # which llmcompressor forces
        "calibration": described_draw(draw),
        "folds": [str(fold) for fold in mappings.folds],
        "unscaled": mappings.unscaled,
    }
    return awq._scales_of, settings


@torch.no_grad()
def round_linears(
    scaled: PreTrainedModel, linears: list[str], weights: QuantizationArgs, spec: AWQ
) -> None:
    """Round the linears of the scaled model to their grids.

    UserError if one is off the grid that it reports, or that grid is not the spec's.
    """
    for name in linears:
        linear: Any = scaled.get_submodule(name)
        weight_OI = linear.weight
        # AWQ moves no errors between weights, so each has to stay near what it is before this
        # rounding.
        source_OI = weight_OI.cpu().clone()
        weight_OI.copy_(forward_quantize(linear, weight_OI, "weight", weights))

        # compressed-tensors counts codes from the middle, where the zero of symmetric grids is
        zeros_OG = torch.zeros_like(linear.weight_scale)
        if not weights.symmetric:
            zeros_OG = linear.weight_zero_point.float()
        grid = ReportedGrid(linear.weight_scale, zeros_OG + 2 ** (spec.bits - 1))
        check_on_grid("llmcompressor", name, weight_OI.cpu(), grid, spec, source_OI)


def changed_values(model: PreTrainedModel, original: PreTrainedModel) -> dict[str, Tensor]:
    """Return every parameter that differs from the original's, and all of linears."""
    parameters, linears = dict(model.named_parameters()), block_linears(model)
    return {
        name: parameters[name].detach().cpu().contiguous()
        for name, parameter in original.named_parameters()
        if name.removesuffix(".weight") in linears or not torch.equal(parameters[name], parameter)
    }


def quantize(job: Job) -> None:
    """Write the job's weights, its scales and, last, its report.

    UserError if the spec does not fit the model, or the library did anything else than asked.
    """
    spec = job.spec
    assert isinstance(spec, AWQ)
    torch.set_num_threads(job.threads)

    def load() -> PreTrainedModel:
        return load_hf_model(
            job.hf_dir, DTYPES[job.dtype], attention="eager", architectures=ARCHITECTURES
        )

    model = load()
    mappings = mappings_for(model)
    linears = [*block_linears(model)]
    check_folds(witness(model), mappings, seed=0)
    weights = weight_arguments(spec)
    scales, settings = calibrate(model, mappings, linears, weights, job)
    # Loaded again, since AWQ has scaled the first one in place.
    original = load()
    check_scaled(model, original, mappings, scales)
    save_file(scales, job.out / SCALES)
    round_linears(model, linears, weights, spec)
    values = changed_values(model, original)
    write_report(job, values, "llmcompressor", llmcompressor.__version__, settings)


if __name__ == "__main__":
    run_process(quantize)
