"""AutoRound (arXiv:2309.05516) by auto-round: `python -m ...run_autoround JOB.json`.

Block by block, signed gradient steps move every weight by up to half a step of its grid before it
is rounded, and shrink the ranges of the grids, to lower the squared error of the block's outputs.
Inputs are those after the rounded blocks before it. The best iteration is kept, judged by the loss
of its own batch; the first is plain rounding.

auto-round leaves out a linear it cannot pack, trains in another dtype, shortens sequences and goes
back to plain rounding without an error. So what it warns of is an error, its log has to name every
block with a finite loss, and every weight has to be on the grid that the linear reports.

Its own conventions, kept: a symmetric grid has a point at the weight of largest size, and none at
its opposite; the last token of every sequence has no part in the loss.

Shapes: O output features, I input features, G groups of a row, N calibration sequences, L tokens of
a sequence.
"""

import gc
import logging
import math
import os
import re
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from base.errors import UserError
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model
from quant_eval.libraries.job import Job, run_process, write_report
from quant_eval.model.families import ARCHITECTURES
from quant_eval.specs import QuantSpec

SEED = 0
BATCH = 8  # sequences of an iteration, as in the paper
REACH = 2  # steps a weight may move: half by rounding, up to one by what is learned
BLOCK_DONE = re.compile(r"quantized (\d+)/(\d+) layers in the block, loss .*: (\S+)")
# Starts of warnings that change nothing: transformers', on a loss that is not computed here.
HARMLESS = ("`loss_type=None` was set in the config",)
ENVIRONMENT_PREFIX = "AR_"  # of variables that change what auto-round does


class Tokenizer:
    """A stand-in: auto-round asks for the padding token alone, and takes repeats for it if none."""

    pad_token_id = -1  # no token is


class Watch(logging.Handler):
    """Keeps what auto-round logs of blocks, and its warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[int, int, float]] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record: rounded linears, all linears and loss of a block, or a warning."""
        if match := BLOCK_DONE.match(record.getMessage()):
            self.blocks.append((int(match[1]), int(match[2]), float(match[3])))
        elif record.levelno >= logging.WARNING and not record.getMessage().startswith(HARMLESS):
            self.warnings.append(record.getMessage())

    def check(self, num_blocks: int, num_linears: int) -> None:
        """Refuse anything but that many blocks with all their linears, tuned to a finite loss."""
        if self.warnings:
            raise UserError(f"auto-round warned: {self.warnings[0]}; choose another method")
        counts = [rounded for rounded, _, _ in self.blocks]
        if len(counts) != num_blocks or sum(counts) != num_linears:
            raise UserError(
                f"auto-round tuned {sum(counts)} of {num_linears} linears in {len(counts)} of"
                f" {num_blocks} blocks; choose another method"
            )
        for index, (_, _, loss) in enumerate(self.blocks):
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss of block {index} is {loss}; check the checkpoint's weights"
                )


def tuning(spec: QuantSpec, batch_size: int) -> dict[str, Any]:
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


def scheme(spec: QuantSpec) -> dict[str, Any]:
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


def check_batch(ids_NL: Tensor) -> None:
    """Refuse sequences that auto-round would leave out."""
    if len(ids_NL) < BATCH:
        raise UserError(
            f"auto-round takes batches of {BATCH} sequences, and there are {len(ids_NL)}; give"
            " more --calibration-sequences"
        )


def check_rounded(name: str, linear: nn.Module, original_OI: Tensor, spec: QuantSpec) -> None:
    """Refuse a weight that is not on the spec's grid, as the linear reports scales and zeros."""
    expected = scheme(spec) | {"scale_dtype": torch.float32}
    for key, value in expected.items():
        if getattr(linear, key, None) != value:
            raise UserError(
                f"auto-round took {key} {getattr(linear, key, None)} instead of {value} for {name}"
            )
    weight_OI = linear.get_parameter("weight").detach().cpu()
    if not bool(weight_OI.isfinite().all()):
        raise UserError(f"auto-round made {name} not finite; check the checkpoint's weights")
    size = spec.group_size or weight_OI.shape[1]
    scale_OG1 = torch.as_tensor(linear.scale).reshape(len(weight_OI), -1, 1)
    zero: Any = torch.as_tensor(linear.zp)
    zero_OG1 = zero.float().reshape(scale_OG1.shape) if zero.numel() > 1 else zero.float()

    weight_OGK = weight_OI.reshape(len(weight_OI), -1, size)
    lowest, highest = -zero_OG1, 2**spec.bits - 1 - zero_OG1
    steps_OGK = (weight_OGK.float() / scale_OG1).round()
    exact_OGK = original_OI.float().reshape(weight_OGK.shape) / scale_OG1
    right_OGK = (steps_OGK * scale_OG1).to(weight_OI.dtype) == weight_OGK
    right_OGK &= (steps_OGK >= lowest) & (steps_OGK <= highest)
    right_OGK &= (steps_OGK - exact_OGK.clamp(lowest, highest)).abs() <= REACH
    if not bool(right_OGK.all()):
        raise UserError(f"auto-round left {name} off its grid; use our own gptq")


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linears of the decoder blocks by name."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }


def changed_weights(
    model: PreTrainedModel, original: PreTrainedModel, linears: dict[str, nn.Linear], job: Job
) -> dict[str, Tensor]:
    """Return the linears' weights, all on their grids.

    UserError if one is not, or anything else differs from the original.
    """
    weights, parameters = {}, dict(model.named_parameters())
    for key, before in original.named_parameters():
        after, name = parameters.pop(key, None), key.removesuffix(".weight")
        if after is None or after.dtype != before.dtype or after.shape != before.shape:
            raise UserError(f"auto-round changed the dtype or shape of {key}; use our own gptq")
        if key == f"{name}.weight" and name in linears:
            check_rounded(name, model.get_submodule(name), before.detach(), job.spec)
            weights[key] = after.detach().cpu().contiguous()
        elif not torch.equal(after.detach().cpu(), before):
            raise UserError(
                f"auto-round changed {key}, which is not a linear of a block; report it"
            )
    if parameters:
        raise UserError(f"auto-round added {min(parameters)}; report it")
    return weights


def quantize(job: Job) -> None:
    """Write the job's weights and, last, its report.

    UserError if the job does not fit the model, or the library did anything else than asked.
    """
    torch.set_num_threads(job.threads)
    ids_NL = load_file(job.calibration)["input_ids"]

    def load() -> PreTrainedModel:
        return load_hf_model(
            job.hf_dir, DTYPES[job.dtype], attention="sdpa", architectures=ARCHITECTURES
        )

    model = load()
    linears = linears_of(model)
    check_batch(ids_NL)

    # before the import, which reads them
    for variable in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        del os.environ[variable]

    from auto_round import AutoRound, __version__
    from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig
    from auto_round.schemes import QuantizationScheme
    from auto_round.utils.device_manager import get_ar_device

    # warnings and losses are in its log alone
    watch = Watch()
    logging.getLogger("autoround").addHandler(watch)
    gc.freeze()  # it collects after every step of its own, over all that the imports left

    # every argument is stated, so that the report has all of them
    settings = pipeline(job, math.gcd(BATCH, job.batch_size))
    if settings["amp"] and not get_ar_device(settings["device_map"]).supports_bf16():
        raise UserError(
            "auto-round tunes in bf16 only on a CPU with AVX512_BF16, and this one has none; give"
            " --dtype fp32"
        )
    algorithm = tuning(job.spec, settings["batch_size"])
    config = SignRoundConfig(**algorithm)
    sequences = [
        {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L)}
        for ids_1L in ids_NL[:, None]
    ]
    rounding = AutoRound(
        model,
        tokenizer=Tokenizer(),
        scheme=QuantizationScheme.from_dict(scheme(job.spec)),
        alg_configs=config,
        dataset=sequences,
        nsamples=len(ids_NL),
        seqlen=ids_NL.shape[1],
        **settings,
    )
    with sdpa_kernel(SDPBackend.MATH):  # the others' gradients vary from run to run on a GPU
        model, _ = rounding.quantize()

    # the result: nothing left out, every weight on its grid
    watch.check(model.config.num_hidden_layers, len(linears))
    weights = changed_weights(model, load(), linears, job)

    # the learning rates are defaults that auto-round fills in
    used = algorithm | {"lr": float(config.lr), "minmax_lr": float(config.minmax_lr)}
    report = {
        "scheme": scheme(job.spec),
        "algorithm": used,
        "pipeline": settings,
        "attention": "sdpa, math",
        "calibration": list(ids_NL.shape),
    }
    write_report(job, weights, "auto-round", __version__, report)


if __name__ == "__main__":
    run_process(quantize)
