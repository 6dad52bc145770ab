"""GPTQ and GPTAQ (arXiv:2504.02692) by gptqmodel: `python -m ...run_gptqmodel JOB.json`.

The weights are gptqmodel's own result in memory, scale x (code - zero) in fp32 and then cast to the
model's dtype, taken when it says that a group of linears is done. Only its packed checkpoints round
the scales to fp16.

gptqmodel repairs a Hessian that it cannot invert: with its damping increments off it still raises
the diagonal, and logs the damping it was asked for. So every inversion is watched here, and a
repaired one ends the job.

Where it departs from the papers, found on models of three blocks, each linear against a float64
reference: the grid of a group that starts inside a block of 128 columns is fitted to weights that
lack the updates from that block (so for groups below 128, but not for `static` ones); and between
such blocks GPTAQ multiplies its second term with the rounded weights, within them with the updated
ones. The weight of an input that is 0 in all of the text becomes 0.

Shapes: I input features, N calibration sequences, L tokens of a sequence.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from base.errors import UserError
from base.files import write_json
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model, read_hf_config
from quant_eval.libraries import pcre
from quant_eval.libraries.job import REPORT, WEIGHTS, Job, LayerReport, Report, run_process
from quant_eval.model.families import ARCHITECTURES, family_of
from quant_eval.specs import QuantSpec

# Found right linear by linear. Olmo is not: gptqmodel does not know the order of its linears, and
# calibrates o_proj and down_proj on inputs from before q_proj and gate_proj were rounded.
RIGHT = (
    *("Olmo2ForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"),
    *("SmolLM3ForCausalLM", "ApertusForCausalLM"),
)
DROPPED_TOKENS = 10  # gptqmodel leaves out sequences of up to so many tokens, whatever it is told
ENVIRONMENT = {
    # the fewest it starts with; on its own it takes as many as there are cores
    "GPTQMODEL_CPU_WORKERS": "2",
    # a kernel compiled at run time, where a compiler happens to be
    "GPTQMODEL_DISABLE_GPTQ_CUDA": "1",
}


def quantize_config(spec: QuantSpec, device: str) -> dict[str, Any]:
    """Return every field of gptqmodel's configuration that has a part in the result."""
    return {
        "method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size or -1,
        "sym": spec.symmetric,
        "desc_act": spec.order == "actorder",
        "act_group_aware": spec.order == "groupaware",
        "static_groups": bool(spec.static_groups),
        "damp_percent": spec.damping,
        "damp_auto_increment": 0.0,
        "gptaq": {"alpha": spec.alpha, "device": device} if spec.method == "gptaq" else None,
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
    """Keeps what gptqmodel rounds, and ends it where it repairs something.

    Args of the constructor:
        model: gptqmodel's.
        process: what gptqmodel calls the method: gptq or gptaq.
    """

    def __init__(self, model: Any, process: str, damping: float) -> None:
        self.weights: dict[str, Tensor] = {}
        self.blocks = model.extract_layers_node()[0]
        self._model, self._process, self._damping = model, process, damping
        self._block, self._inversions = "", 0
        self._problems: list[str] = []

    def subset_event(
        self,
        *,
        stage: str,
        layer_idx: int,
        module_names: list[str],
        processor: Callable[[], str],
        **_: int,
    ) -> None:
        """Take what gptqmodel rounded; it calls this around every group of linears of one input."""
        self._block = f"{self.blocks}.{layer_idx}"
        if self._problems:
            raise UserError(min(self._problems))
        if stage == "quant_complete" and processor() == self._process:
            if not self._inversions:
                raise UserError(
                    f"gptqmodel rounded {self._block} without a Hessian; use our own gptq"
                )
            self._inversions = 0
            for name in module_names:
                linear = f"{self._block}.{name}"
                weight = self._model.model.get_submodule(linear).weight
                if not bool(weight.isfinite().all()):
                    raise UserError(
                        f"gptqmodel made {linear} not finite; check the checkpoint's weights"
                    )
                self.weights[f"{linear}.weight"] = weight.detach().cpu().clone()

    def over(
        self, invert: Callable[[Any, Tensor], tuple[Tensor | None, float]]
    ) -> Callable[[Any, Tensor], tuple[Tensor, float]]:
        """Return `invert`, watched: a repair, anything but the stated damping, is a problem.

        A problem ends the job at the next event: an exception in one of gptqmodel's workers would
        kill the process.
        """

        def watched(task: Any, hessian_II: Tensor) -> tuple[Tensor, float]:
            self._inversions += 1
            name, before_I = f"{self._block}.{task.name}", hessian_II.diagonal().clone()
            identity_II = torch.eye(len(hessian_II), device=hessian_II.device)
            if not bool(hessian_II.isfinite().all()):
                self._problems.append(
                    f"inputs of {name} are not finite; check the checkpoint's weights"
                )
                return identity_II, self._damping
            factor_II, damping = invert(task, hessian_II)
            if factor_II is None:
                self._problems.append(
                    f"gptqmodel did not invert the Hessian of {name}; use a larger damp"
                )
                return identity_II, self._damping
            raised = float((hessian_II.diagonal() - before_I).mean() / before_I.mean())
            if raised or damping != self._damping:
                self._problems.append(
                    f"gptqmodel changed damping of {name} from {self._damping:g} to"
                    f" {damping + raised:g}; use a larger damp"
                )
            return factor_II, damping

        return watched


def load_for_gptqmodel(job: Job) -> PreTrainedModel:
    """The model, of an architecture that gptqmodel quantizes as it says.

    Raises:
        UserError: it is of another, or its blocks differ.
    """
    held = read_hf_config(job.hf_dir, ARCHITECTURES)["architectures"][0]
    if held not in RIGHT:
        raise UserError(
            f"{job.hf_dir} holds a {held}, which gptqmodel calibrates on wrong inputs; use our own"
            " gptq"
        )
    model = load_hf_model(job.hf_dir, DTYPES[job.dtype], attention="sdpa", architectures=RIGHT)
    family_of(model.config)
    return model


def check_log(
    log: list[dict[str, str]], watch: Watch, job: Job, linears: set[str], samples: int
) -> tuple[LayerReport, ...]:
    """Return what gptqmodel logged of every linear, each calibrated on all `samples`.

    Raises:
        UserError: it left a linear out, or calibrated one on other than all tokens.
    """
    layers = []
    for row in log:
        name = f"{watch.blocks}.{row['layer']}.{row['module']}"
        if int(row["samples"]) != samples:
            raise UserError(
                f"gptqmodel calibrated {name} on {row['samples']} of {samples} samples; report it"
            )
        try:
            objective = float(row["loss"])
        except ValueError:
            raise UserError(
                f"gptqmodel rounded {name} by {row['loss']} instead of GPTQ; use our own gptq"
            ) from None
        layers.append(LayerReport(name=name, damping=job.spec.damping, objective=objective))
    strays = linears.symmetric_difference(layer.name for layer in layers)
    strays |= linears.symmetric_difference(name.removesuffix(".weight") for name in watch.weights)
    if strays:
        raise UserError(f"gptqmodel left out {min(strays)}; use our own gptq")
    return tuple(sorted(layers, key=lambda layer: layer.name))


def quantize(job: Job) -> None:
    """Write the job's weights and, last, its report.

    Raises:
        UserError: the job is not gptqmodel's or does not fit the model, or the library did anything
            else than asked.
    """
    spec = job.spec
    if spec.method not in ("gptqmodel", "gptaq"):
        raise UserError(f"spec {spec.name} is not for gptqmodel; give a gptqmodel or gptaq spec")
    if spec.damping is None or not 0 < spec.damping < 1:
        raise UserError(f"spec {spec.name}: gptqmodel takes a damp above 0 and below 1")
    torch.set_num_threads(job.threads)
    ids_NL = load_file(job.calibration)["input_ids"]
    if ids_NL.shape[1] <= DROPPED_TOKENS:
        raise UserError(
            f"gptqmodel drops sequences of {ids_NL.shape[1]} tokens; calibrate on longer ones"
        )
    hf_model = load_for_gptqmodel(job)
    output = hf_model.get_output_embeddings()
    linears = {
        name for name, m in hf_model.named_modules() if isinstance(m, nn.Linear) and m is not output
    }
    os.environ.update(ENVIRONMENT)
    pcre.stand_in()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    import gptqmodel
    from gptqmodel.models._const import normalize_device
    from gptqmodel.models.auto import check_and_get_model_definition
    from gptqmodel.quantization import GPTQ

    settings = quantize_config(spec, device)
    config = gptqmodel.QuantizeConfig(**settings, compute_device_filter=lambda devices: devices[:1])
    for key, value in settings.items():
        if isinstance(value, int | float | None) and getattr(config, key) != value:
            raise UserError(
                f"spec {spec.name}: gptqmodel takes {getattr(config, key)} instead of {value} for"
                f" {key}"
            )
    config.device = normalize_device(device)
    # Not through GPTQModel.load: that wants a tokenizer beside the model, and has no use for it.
    definition = check_and_get_model_definition(str(job.hf_dir))
    model = definition(
        hf_model,
        quantized=False,
        quantize_config=config,
        tokenizer=None,
        model_local_path=str(job.hf_dir),
    )
    process = "gptaq" if spec.method == "gptaq" else "gptq"
    model.subset_callback = watch = Watch(model, process, spec.damping)
    GPTQ.hessian_inverse = watch.over(GPTQ.hessian_inverse)
    arguments = {
        "batch_size": job.batch_size,
        "calibration_sort": None,
        "calibration_concat_size": None,
    }
    sequences = [{"input_ids": ids_L, "attention_mask": torch.ones_like(ids_L)} for ids_L in ids_NL]
    logs = model.quantize(sequences, **arguments)
    layers = check_log(
        logs[process], watch, job, linears, ids_NL.numel() if process == "gptq" else len(ids_NL)
    )
    save_file(watch.weights, job.out / WEIGHTS)
    report = Report(
        library="gptqmodel",
        version=gptqmodel.__version__,
        settings={
            "quantize_config": settings,
            "quantize": arguments,
            "environment": ENVIRONMENT,
            "attention": "sdpa",
            "calibration": list(ids_NL.shape),
            "threads": job.threads,
        },
        layers=layers,
    )
    write_json(job.out / REPORT, report.model_dump(mode="json"))


if __name__ == "__main__":
    run_process(quantize)
