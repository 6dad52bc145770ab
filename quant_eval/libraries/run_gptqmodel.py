"""GPTQ and GPTAQ (arXiv:2504.02692) by gptqmodel: `python -m ...run_gptqmodel JOB.json`.

The weights are what gptqmodel's rounding returns, scale x (code - zero) in fp32 and then cast to
the model's dtype, with the grids. Only its packed checkpoints round the scales to fp16.

gptqmodel repairs a Hessian that it cannot invert: with its damping increments off it still raises
the diagonal, and logs the damping it was asked for. It rounds to nearest where it has no Hessian,
and leaves out sequences. The weights do not show it, so every inversion and every rounding is
watched here, and a repaired one ends the job.

Where it departs from the papers, found on models of three blocks, each linear against a float64
reference: the grid of a group that starts inside a block of 128 columns is fitted to weights that
lack the updates from that block (so for groups below 128, but not for `static` ones); and between
such blocks GPTAQ multiplies its second term with the rounded weights, within them with the updated
ones. The weight of an input that is 0 in all of the text becomes 0.

Shapes: O output features, I input features, G groups of them, L tokens of a sequence.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from base.errors import UserError
from base.libraries.private_names import replace
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model
from quant_eval.draws import DROPPED_TOKENS, described_draw, is_ragged, load_draw
from quant_eval.libraries import pcre
from quant_eval.libraries.job import Job, run_process, write_report
from quant_eval.libraries.outcome import (
    Grids,
    ReportedGrid,
    block_linears,
    check_alike,
    check_outcome,
    original_weights,
)
from quant_eval.quantizers.libraries import BY_GPTQMODEL, GPTAQ, GPTQModel

Inversion = Callable[[Any, Tensor], tuple[Tensor | None, float]]
ENVIRONMENT = {
    # the fewest it starts with; on its own it takes as many as there are cores
    "GPTQMODEL_CPU_WORKERS": "2",
    # a kernel compiled at run time, where a compiler happens to be
    "GPTQMODEL_DISABLE_GPTQ_CUDA": "1",
}


def quantize_config(spec: GPTQModel | GPTAQ, device: str) -> dict[str, Any]:
    """Return every field of gptqmodel's configuration that has a part in the result."""
    return {
        "method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size or -1,
        "sym": spec.symmetric,
        "desc_act": spec.order == "actorder",
        "act_group_aware": spec.order == "groupaware",
        "static_groups": spec.static_groups,
        "damp_percent": spec.damping,
        "damp_auto_increment": 0.0,
        "gptaq": {"alpha": spec.alpha, "device": device} if isinstance(spec, GPTAQ) else None,
        "foem": None,
        "mse": 0.0,
        "true_sequential": True,
        "lm_head": False,
        "fallback": None,
        "mock_quantization": False,
        "hessian": {
            "chunk_size": None,
            "chunk_bytes": None,
            "staging_dtype": "float32",
            "dedup_shared_inputs": True,
        },
        "dynamic": None,
        "preprocessors": [],
        "smoother": None,
        "rotation": None,
        "activation": None,
        "moe": None,
        "adapter": None,
        "format": "gptq",
        "pack_impl": "original",  # the default compiles C++; what it packs is thrown away
        "device": device,
        "auto_forward_data_parallel": False,
        "offload_to_disk": False,
    }


class Watch:
    """The weights that gptqmodel rounds, with their grids, and an end where it repairs something.

    Args of the constructor:
        model: gptqmodel's own.
        damping: the share of the Hessian's mean diagonal that was asked for.
        samples: the number on which every linear has to be calibrated, as gptqmodel counts them.
    """

    def __init__(self, model: Any, damping: float, samples: int) -> None:
        self.weights: dict[str, Tensor] = {}
        self.grids = Grids()
        self._blocks = model.extract_layers_node()[0]
        self._damping, self._samples = damping, samples
        self._block, self._inversions = "", 0
        self._problems: list[str] = []

    def subset_event(self, *, stage: str, layer_idx: int, **_: Any) -> None:
        """Raise UserError for a problem: gptqmodel calls this around every group of linears.

        An exception in one of gptqmodel's workers, which invert and round, would kill the process.
        """
        self._block = f"{self._blocks}.{layer_idx}"
        if stage == "quant_start":
            self._inversions = 0
        self.check()

    def check(self) -> None:
        """Raise UserError if anything was repaired."""
        if self._problems:
            raise UserError(min(self._problems))

    def over_inversion(self, invert: Inversion) -> Inversion:
        """Return `invert`, watched: anything but the stated damping is a problem."""

        def watched(task: Any, hessian_II: Tensor) -> tuple[Tensor | None, float]:
            self._inversions += 1
            name, before_I = f"{self._block}.{task.name}", hessian_II.diagonal().clone()
            factor_II, damping = None, self._damping
            if bool(hessian_II.isfinite().all()):
                factor_II, damping = invert(task, hessian_II)
            if factor_II is None:
                self._problems.append(
                    f"gptqmodel did not invert the Hessian of {name}; use a larger damp, or check"
                    " the checkpoint's weights"
                )
                # A worker must not raise (see `subset_event`): it gets any factor, and `check` ends
                # the job.
                return torch.eye(len(hessian_II), device=hessian_II.device), self._damping
            raised = float((hessian_II.diagonal() - before_I).mean() / before_I.mean())
            if raised or damping != self._damping:
                self._problems.append(
                    f"gptqmodel changed damping of {name} from {self._damping:g} to"
                    f" {damping + raised:g}; use a larger damp"
                )
            return factor_II, damping

        return watched

    def over_rounding(self, rounding: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], Any]:
        """Return `rounding`, watched: its results are kept, and anything but GPTQ is a problem."""

        def watched(task: Any) -> tuple[Any, ...]:
            result = rounding(task)
            weight_OI, scales_OG, zeros_OG, groups_I, _, loss, _, samples = result
            name = f"{self._block}.{task.name}"
            if samples != self._samples:
                self._problems.append(
                    f"gptqmodel calibrated {name} on {samples} of {self._samples} samples;"
                    " report it"
                )
            if isinstance(loss, str):  # the name of its fallback
                self._problems.append(
                    f"gptqmodel rounded {name} by {loss} instead of GPTQ; use our own gptq"
                )
            if not self._inversions:  # one serves all linears of a group
                self._problems.append(
                    f"gptqmodel rounded {name} without a Hessian; use our own gptq"
                )
            self.weights[f"{name}.weight"] = weight_OI.cpu().clone()
            self.grids[name] = ReportedGrid(scales_OG.cpu(), zeros_OG.cpu(), groups_I.cpu())
            return result

        return watched


def quantize(job: Job) -> None:
    """Write the job's weights and, last, its report.

    UserError if the job does not fit the model, or the library did anything else than asked.
    """
    spec = job.spec
    assert isinstance(spec, GPTQModel | GPTAQ)
    if not 0 < spec.damping < 1:
        raise UserError(f"spec {spec.name}: gptqmodel takes a damp above 0 and below 1")
    torch.set_num_threads(job.threads)
    draw = load_draw(job.calibration)
    shortest = min(map(len, draw))
    if shortest <= DROPPED_TOKENS:
        raise UserError(f"gptqmodel drops sequences of {shortest} tokens; calibrate on longer ones")

    dtype = DTYPES[job.dtype]
    hf_model = load_hf_model(job.hf_dir, dtype, attention="sdpa", architectures=BY_GPTQMODEL)
    check_alike("gptqmodel", hf_model.config, max(map(len, draw)))
    # Names are taken before gptqmodel works on the model, which it does not leave as it was.
    linears, original = [*block_linears(hf_model)], original_weights(job.hf_dir, hf_model, dtype)

    # before the import, which needs both
    os.environ.update(ENVIRONMENT)
    pcre.stand_in()

    import gptqmodel
    from gptqmodel import quantization
    from gptqmodel.models._const import normalize_device
    from gptqmodel.models.auto import check_and_get_model_definition

    # its configuration may replace a value that it does not take
    settings = quantize_config(spec, job.device)
    config = gptqmodel.QuantizeConfig(**settings, compute_device_filter=lambda devices: devices[:1])
    for key, value in settings.items():
        if isinstance(value, int | float | None) and getattr(config, key) != value:
            raise UserError(
                f"spec {spec.name}: gptqmodel takes {getattr(config, key)} instead of {value} for"
                f" {key}"
            )
    config.device = normalize_device(job.device)

    # Not through GPTQModel.load: that wants a tokenizer beside the model, and has no use for it.
    definition = check_and_get_model_definition(str(job.hf_dir))
    model = definition(
        hf_model,
        quantized=False,
        quantize_config=config,
        tokenizer=None,
        model_local_path=str(job.hf_dir),
    )

    # GPTQ counts tokens, GPTAQ sequences
    task, samples = quantization.GPTQ, sum(map(len, draw))
    if isinstance(spec, GPTAQ):
        task, samples = quantization.GPTAQ, len(draw)
    model.subset_callback = watch = Watch(model, spec.damping, samples)
    inversion = watch.over_inversion(quantization.GPTQ.hessian_inverse)
    replace(quantization.GPTQ, "hessian_inverse", inversion)
    replace(task, "quantize", watch.over_rounding(task.quantize))

    # the sequences as they are, neither sorted nor joined
    arguments = {
        "batch_size": 1 if is_ragged(draw) else job.batch_size,  # it would pad, which is no text
        "calibration_sort": None,
        "calibration_concat_size": None,
    }
    sequences = [{"input_ids": ids_L, "attention_mask": torch.ones_like(ids_L)} for ids_L in draw]
    # packing takes the biases of linears out of the model
    biases = {key: value for key, value in hf_model.named_parameters() if key.endswith(".bias")}
    model.quantize(sequences, **arguments)

    watch.check()
    after = biases | dict(hf_model.named_parameters()) | watch.weights
    weights = check_outcome(
        "gptqmodel", after, original, watch.grids, linears, spec, moves_errors=True
    )
    report = {
        "quantize_config": settings,
        "quantize": arguments,
        "environment": ENVIRONMENT,
        "attention": "sdpa",
        "calibration": described_draw(draw),
    }
    write_report(job, weights, "gptqmodel", gptqmodel.__version__, report)


if __name__ == "__main__":
    run_process(quantize)
