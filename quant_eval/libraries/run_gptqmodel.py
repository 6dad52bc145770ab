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
from safetensors.torch import load_file
from torch import Tensor, nn

from base.errors import UserError
from base.libraries.private_names import replace
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model
from quant_eval.libraries import pcre
from quant_eval.libraries.job import Job, run_process, write_report
from quant_eval.specs import QuantSpec

# Found right linear by linear. Olmo is not: gptqmodel does not know the order of its linears, and
# calibrates o_proj and down_proj on inputs from before q_proj and gate_proj were rounded.
RIGHT = (
    *("Olmo2ForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"),
    *("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("SmolLM3ForCausalLM", "ApertusForCausalLM"),
)
DROPPED_TOKENS = 10  # gptqmodel always leaves out sequences of up to so many tokens
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

    `process` is what gptqmodel calls the method: gptq or gptaq.
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
        """Copy the weights that gptqmodel rounded.

        gptqmodel calls this before and after every group of linears of one input.
        """
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

        It ends the job at the next event: an exception in one of gptqmodel's workers would kill the
        process.
        """

        def watched(task: Any, hessian_II: Tensor) -> tuple[Tensor, float]:
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
                return torch.eye(len(hessian_II), device=hessian_II.device), self._damping
            raised = float((hessian_II.diagonal() - before_I).mean() / before_I.mean())
            if raised or damping != self._damping:
                self._problems.append(
                    f"gptqmodel changed damping of {name} from {self._damping:g} to"
                    f" {damping + raised:g}; use a larger damp"
                )
            return factor_II, damping

        return watched


def check_log(log: list[dict[str, str]], watch: Watch, linears: set[str], samples: int) -> None:
    """Refuse a log of anything but GPTQ of every linear, each calibrated on all `samples`."""
    logged = set()
    for row in log:
        name = f"{watch.blocks}.{row['layer']}.{row['module']}"
        if int(row["samples"]) != samples:
            raise UserError(
                f"gptqmodel calibrated {name} on {row['samples']} of {samples} samples; report it"
            )
        try:
            float(row["loss"])
        except ValueError:
            raise UserError(
                f"gptqmodel rounded {name} by {row['loss']} instead of GPTQ; use our own gptq"
            ) from None
        logged.add(name)
    strays = linears ^ logged
    strays |= linears.symmetric_difference(name.removesuffix(".weight") for name in watch.weights)
    if strays:
        raise UserError(f"gptqmodel left out {min(strays)}; use our own gptq")


def quantize(job: Job) -> None:
    """Write the job's weights and, last, its report.

    UserError if the job does not fit the model, or the library did anything else than asked.
    """
    spec = job.spec
    if spec.damping is None or not 0 < spec.damping < 1:
        raise UserError(f"spec {spec.name}: gptqmodel takes a damp above 0 and below 1")
    torch.set_num_threads(job.threads)
    ids_NL = load_file(job.calibration)["input_ids"]
    if ids_NL.shape[1] <= DROPPED_TOKENS:
        raise UserError(
            f"gptqmodel drops sequences of {ids_NL.shape[1]} tokens; calibrate on longer ones"
        )

    hf_model = load_hf_model(job.hf_dir, DTYPES[job.dtype], attention="sdpa", architectures=RIGHT)
    output = hf_model.get_output_embeddings()
    linears = {
        name for name, m in hf_model.named_modules() if isinstance(m, nn.Linear) and m is not output
    }

    # before the import, which needs both
    os.environ.update(ENVIRONMENT)
    pcre.stand_in()

    import gptqmodel
    from gptqmodel.models._const import normalize_device
    from gptqmodel.models.auto import check_and_get_model_definition
    from gptqmodel.quantization import GPTQ

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

    # the watch sees every inverted Hessian and every rounded group
    process = "gptaq" if spec.method == "gptaq" else "gptq"
    model.subset_callback = watch = Watch(model, process, spec.damping)
    replace(GPTQ, "hessian_inverse", watch.over(GPTQ.hessian_inverse))

    # the sequences as they are, neither sorted nor joined
    arguments = {
        "batch_size": job.batch_size,
        "calibration_sort": None,
        "calibration_concat_size": None,
    }
    sequences = [{"input_ids": ids_L, "attention_mask": torch.ones_like(ids_L)} for ids_L in ids_NL]
    logs = model.quantize(sequences, **arguments)

    # GPTQ counts tokens, GPTAQ sequences
    samples = ids_NL.numel() if process == "gptq" else len(ids_NL)
    check_log(logs[process], watch, linears, samples)
    report = {
        "quantize_config": settings,
        "quantize": arguments,
        "environment": ENVIRONMENT,
        "attention": "sdpa",
        "calibration": list(ids_NL.shape),
    }
    write_report(job, watch.weights, "gptqmodel", gptqmodel.__version__, report)


if __name__ == "__main__":
    run_process(quantize)
