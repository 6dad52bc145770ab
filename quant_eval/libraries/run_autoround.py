"""AutoRound (arXiv:2309.05516) by auto-round: `python -m ...run_autoround JOB.json`.

Block by block, signed gradient steps move every weight by up to half a step of its grid before it
is rounded, and shrink the ranges of the grids, to lower the squared error of the block's outputs.
Inputs are those after the rounded blocks before it. The best iteration is kept, judged by the loss
of its own batch; the first is plain rounding.

auto-round trains in another dtype, shortens sequences and goes back to plain rounding without an
error, and the weights do not show it. So what it warns of is an error, and its log has to name
every block with a finite loss. What the weights show, `outcome` checks.

Its own conventions, kept: a symmetric grid has a point at the weight of largest size, and none at
its opposite; the last token of every sequence has no part in the loss.

Shapes: O output features, G groups of input features, L tokens of a sequence.
"""

import gc
import logging
import math
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from base.errors import UserError
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model
from quant_eval.draws import described_draw, load_draw
from quant_eval.libraries.job import Job, run_process, write_report
from quant_eval.libraries.outcome import (
    Grids,
    ReportedGrid,
    block_linears,
    check_alike,
    check_outcome,
    original_weights,
)
from quant_eval.quantizers.libraries import AutoRound
from train.model.families import ARCHITECTURES

SEED = 0
BATCH = 8  # sequences of an iteration, as in the paper
BLOCK_DONE = re.compile(r"quantized .* layers in the block, loss .*: (\S+)")
# Starts of warnings that change nothing: transformers', on a loss that is not computed here.
HARMLESS = ("`loss_type=None` was set in the config",)
ENVIRONMENT_PREFIX = "AR_"  # of variables that change what auto-round does


class Tokenizer:
    """A stand-in: auto-round asks for the padding token alone, and takes repeats for it if none."""

    pad_token_id = -1  # no token is


class TuningLog(logging.Handler):
    """The loss of each block that auto-round tuned, and its warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record: the loss of a block, or a warning."""
        if match := BLOCK_DONE.match(record.getMessage()):
            self.losses.append(float(match[1]))
        elif record.levelno >= logging.WARNING and not record.getMessage().startswith(HARMLESS):
            self.warnings.append(record.getMessage())

    def check(self, num_blocks: int) -> None:
        """Refuse warnings, and anything but that many blocks tuned to a finite loss.

        A block that was not tuned, or whose loss is NaN, is left plainly rounded: on its grid.
        """
        if self.warnings:
            raise UserError(f"auto-round warned: {self.warnings[0]}; choose another method")
        if len(self.losses) != num_blocks:
            raise UserError(
                f"auto-round tuned {len(self.losses)} of {num_blocks} blocks; choose another method"
            )
        for index, loss in enumerate(self.losses):
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss of block {index} is {loss}; check the checkpoint's weights"
                )


def tuning(spec: AutoRound, batch_size: int) -> dict[str, Any]:
    """Return every argument of auto-round's algorithm.

    None is for a default of auto-round, which the report states. A batch that does not fit at once
    is several smaller ones of one gradient.
    """
    return {
        "iters": spec.iterations,
        "lr": None,
        "minmax_lr": None,
        "lr_scheduler": None,
        "momentum": 0.0,
        "nblocks": 1,
        "enable_minmax_tuning": True,
        "enable_norm_bias_tuning": False,
        "gradient_accumulate_steps": BATCH // batch_size,
        "enable_alg_ext": False,
        "not_use_best_mse": False,
        "dynamic_max_gap": -1,
        "enable_quanted_input": True,
        "optimizer": None,
        "enable_adam": False,
        "enable_lfq": False,
    }


def scheme(spec: AutoRound) -> dict[str, Any]:
    """Return the grids in auto-round's words."""
    return {
        "bits": spec.bits,
        "group_size": spec.group_size or -1,
        "sym": spec.symmetric,
        "data_type": "int",
        "act_bits": 16,
    }


def pipeline(job: Job, batch_size: int) -> dict[str, Any]:
    """Return what else auto-round takes that has a part in the result."""
    return {
        "batch_size": batch_size,
        "seed": SEED,
        "scale_dtype": "fp32",
        # without it auto-round computes in fp32, so it is off there and on for bf16
        "amp": job.dtype == "bf16",
        "enable_torch_compile": False,
        "low_gpu_mem_usage": False,
        "low_cpu_mem_usage": False,
        "enable_deterministic_algorithms": True,
        "device_map": "cpu" if job.device == "cpu" else "cuda:0",
    }


def reported_grids(linears: Iterable[str], model: nn.Module, spec: AutoRound) -> Grids:
    """Return the grids that the linears of a model report, those left out aside.

    UserError for a setting that is not the spec's: auto-round falls back to its defaults.
    """
    expected, grids = scheme(spec) | {"scale_dtype": torch.float32}, Grids()
    for name in linears:
        linear: Any = model.get_submodule(name)
        if not hasattr(linear, "scale"):
            continue
        for key, value in expected.items():
            taken = getattr(linear, key, None)
            if taken != value:
                raise UserError(f"auto-round took {key} {taken} instead of {value} for {name}")
        scales_OG = torch.as_tensor(linear.scale).reshape(linear.out_features, -1)
        zeros = torch.as_tensor(linear.zp)  # one for all where the grid is symmetric
        zeros = zeros.reshape(scales_OG.shape) if zeros.numel() > 1 else zeros.expand_as(scales_OG)
        grids[name] = ReportedGrid(scales_OG, zeros)
    return grids


def quantize(job: Job) -> None:
    """Write the job's weights and, last, its report.

    UserError if the job does not fit the model, or the library did anything else than asked.
    """
    spec = job.spec
    assert isinstance(spec, AutoRound)
    torch.set_num_threads(job.threads)
    draw = load_draw(job.calibration)

    dtype = DTYPES[job.dtype]
    model = load_hf_model(job.hf_dir, dtype, attention="sdpa", architectures=ARCHITECTURES)
    check_alike("auto-round", model.config, max(map(len, draw)))
    linears, original = block_linears(model), original_weights(job.hf_dir, model, dtype)
    if len(draw) < BATCH:  # it would leave them out
        raise UserError(
            f"auto-round takes batches of {BATCH} sequences, and there are {len(draw)}; give"
            " more --calibration-sequences"
        )

    # before the import, which reads them
    for variable in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        del os.environ[variable]

    import auto_round
    from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig
    from auto_round.schemes import QuantizationScheme
    from auto_round.utils.device_manager import get_ar_device

    # warnings and losses are in its log alone
    log = TuningLog()
    logging.getLogger("autoround").addHandler(log)
    gc.freeze()  # it collects after every step of its own, over all that the imports left

    # every argument is stated, so that the report has all of them
    settings = pipeline(job, math.gcd(BATCH, job.batch_size))
    if settings["amp"] and not get_ar_device(settings["device_map"]).supports_bf16():
        raise UserError(
            "auto-round tunes in bf16 only on a CPU with AVX512_BF16, and this one has none; give"
            " --dtype fp32"
        )
    algorithm = tuning(spec, settings["batch_size"])
    config = SignRoundConfig(**algorithm)
    sequences = [
        {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L)}
        for ids_1L in torch.stack(list(draw))[:, None]
    ]
    rounding = auto_round.AutoRound(
        model,
        tokenizer=Tokenizer(),
        scheme=QuantizationScheme.from_dict(scheme(spec)),
        alg_configs=config,
        dataset=sequences,
        nsamples=len(draw),
        seqlen=len(draw[0]),
        **settings,
    )
    with sdpa_kernel(SDPBackend.MATH):  # the others' gradients vary from run to run on a GPU
        model, _ = rounding.quantize()

    log.check(model.config.num_hidden_layers)
    weights = check_outcome(
        "auto-round",
        dict(model.named_parameters()),
        original,
        reported_grids(linears, model, spec),
        linears,
        spec,
        moves_errors=False,
    )

    # the learning rates are defaults that auto-round fills in
    used = algorithm | {"lr": float(config.lr), "minmax_lr": float(config.minmax_lr)}
    report = {
        "scheme": scheme(spec),
        "algorithm": used,
        "pipeline": settings,
        "attention": "sdpa, math",
        "calibration": described_draw(draw),
    }
    write_report(job, weights, "auto-round", auto_round.__version__, report)


if __name__ == "__main__":
    run_process(quantize)
