"""Comparison of an HF directory with the probe that the training engine computed (`Engine.probe`).

transformers computes the probe once more, in fp32 from the files. The first module that answers
differently to the same input names the wrong parameter.

Shapes: B sequences, S tokens, V vocabulary, W width of a module's output.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from base.errors import UserError
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import empty_model, names_in_files, stream_through
from train.model.families import FAMILIES
from train.run.directory import PROBE_OUTPUTS

# Largest allowed |difference| of an output over the largest |value| of that output, after the first
# layer. Rounding errors of the layers add up like a random walk: after layer n they are sqrt(n)
# times as large. Measured at 2 to 64 layers and widths of 32 to 1024 are up to 1e-6 in fp32, which
# is the same arithmetic in another order. In bf16 they are 1.1e-2 with initial weights and 5e-3
# after training: the engine rounds a dozen activations of a layer to 8 bits of mantissa, and
# transformers in fp32 does not. The limit is nearly twice the larger. It would not show a rotary
# embedding in bf16, which is one rounding more: `tests.train.test_elementwise` does.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
# Outputs of attention, in all families.
ATTENTION = tuple({f".{row.attention}.{row.writing}" for row in FAMILIES.values()})
# A layer's modules in the order of the data flow, in all families.
STAGES = tuple(
    {name for names in stage for name in names}
    for stage in zip(*(row.data_flow for row in FAMILIES.values()), strict=True)
)

Stage = tuple[float, float]  # layer, and stage within it


def stage_of(key: str) -> Stage:
    """Return the place of an output of the probe in the data flow."""
    if key == "logits":
        return math.inf, 1
    match = re.search(r"\.layers\.(\d+)(?:\.(?:\w+\.)*(\w+))?$", key)
    if not match:  # the embedding, or the final norm
        return (-1, 0) if ".embed_" in key else (math.inf, 0)
    layer, name = int(match[1]), match[2]
    # The output of a layer as a whole has no stage of its own and comes after all of them.
    return layer, next((index for index, names in enumerate(STAGES) if name in names), len(STAGES))


def _parameters_of(model: Any) -> dict[str, list[str]]:
    """Return the parameters that each module of the probe itself holds, by key of its output.

    The key of a layer is the residual stream after it, which has no parameters.
    """
    files, layers = names_in_files(model), set(model.base_model.layers)
    lm_head = model.get_output_embeddings()
    parameters = {}
    for name, module in model.named_modules():
        names = [key for key, _ in module.named_parameters(recurse=False)]
        if names or module in layers:
            key = "logits" if module is lm_head else PROBE_OUTPUTS + name
            parameters[key] = [files[f"{name}.{parameter}"] for parameter in names]
    return parameters


def compute_probe(hf_dir: Path, input_ids_BS: Tensor) -> dict[str, Tensor]:
    """Return what `Engine.probe` returns for these tokens, by transformers, in fp32 on the CPU.

    Raises:
        UserError: the weights are not those of config.json, or cannot be read.
    """
    model = empty_model(read_config(hf_dir))
    return _outputs(model, _parameters_of(model), hf_dir, input_ids_BS)


def _outputs(
    model: Any, parameters: dict[str, list[str]], hf_dir: Path, input_ids_BS: Tensor
) -> dict[str, Tensor]:
    """Return the outputs of the modules with these keys, of an empty model and its weights."""
    embedding = model.get_input_embeddings()
    outputs: dict[str, Tensor] = {}

    def observe(name: str, output_BSW: Tensor) -> None:
        if PROBE_OUTPUTS + name in parameters:
            # Later modules see every token through attention: the last token's output suffices.
            every_token = model.get_submodule(name) is embedding
            outputs[PROBE_OUTPUTS + name] = output_BSW if every_token else output_BSW[:, -1].clone()

    return {"logits": stream_through(model, hf_dir, input_ids_BS, observe), **outputs}


def check_probe(hf_dir: Path, probe: dict[str, Tensor], precision: str) -> dict[str, Any]:
    """Compare what transformers and the training engine compute from the probe's tokens.

    Args:
        hf_dir: an HF directory, complete but perhaps for its lineage.
        probe: "input_ids" [B, S] and what `Engine.probe` returned for them.
        precision: of the engine's arithmetic or of the conversion, whichever is coarser; a key of
            `TOLERANCE`.

    Returns:
        max_absolute_error and max_logit of the logits; precision, and the tolerance it allows after
        the last layer; and at each of the levels attention, layer and logits the largest
        |difference| over the largest |value| of the same output.

    Raises:
        UserError: the tolerance is exceeded; names the parameters whose modules first deviate,
            though their inputs agree. Or the probe is not of this model.
    """
    model = empty_model(read_config(hf_dir))
    parameters = _parameters_of(model)
    unmatched = sorted(probe.keys() ^ {"input_ids", *parameters})
    if unmatched:
        raise UserError(
            f"the probe and config.json are not of the same model, see '{unmatched[0]}'"
        )
    outputs = _outputs(model, parameters, hf_dir, probe["input_ids"])
    errors = {key: _relative_error(key, outputs[key], probe[key]) for key in parameters}
    levels = {
        "attention": max(error for key, error in errors.items() if key.endswith(ATTENTION)),
        # Outputs without parameters are those of whole layers.
        "layer": max(errors[key] for key, names in parameters.items() if not names),
        "logits": errors["logits"],
    }

    # Rounding errors add up over the layers before an output.
    num_layers = sum(not names for names in parameters.values())
    # The embedding is allowed as much as one layer, final norm and logits as all layers.
    layers = {key: min(max(stage_of(key)[0] + 1, 1), num_layers) for key in parameters}
    allowed = {key: TOLERANCE[precision] * math.sqrt(layers[key]) for key in parameters}
    _check_errors(parameters, errors, allowed, levels)
    return {
        "max_absolute_error": (outputs["logits"] - probe["logits"]).abs().max().item(),
        "max_logit": probe["logits"].abs().max().item(),
        "precision": precision,
        "tolerance": allowed["logits"],
        **levels,
    }


def _relative_error(key: str, output: Tensor, expected: Tensor) -> float:
    """Return max |difference| / max |value|; infinity where a number is not finite."""
    if output.shape != expected.shape:
        raise UserError(
            f"the probe's '{key}' is {tuple(expected.shape)}, config.json makes it"
            f" {tuple(output.shape)}"
        )
    # An output of zeros must not divide by 0.
    largest = max(expected.abs().max().item(), torch.finfo(torch.float32).tiny)
    error = (output - expected).abs().max().item() / largest
    return error if math.isfinite(error) else math.inf


def _check_errors(
    parameters: dict[str, list[str]],
    errors: dict[str, float],
    allowed: dict[str, float],
    levels: dict[str, float],
) -> None:
    """Raise UserError naming the parameters of the first outputs whose error is not allowed."""
    deviating = [key for key in errors if errors[key] > allowed[key]]
    if not deviating:
        return

    # All modules after a wrong one have wrong inputs: only the first stage is named.
    first = min(map(stage_of, deviating))
    wrong = [key for key in deviating if stage_of(key) == first]
    names = [
        name
        for key in wrong
        for name in parameters[key] or [f"the sum in {key[len(PROBE_OUTPUTS) :]}"]
    ]
    hint = " (or heads and rope in config.json)" * any(key.endswith(ATTENTION) for key in wrong)
    summary = ", ".join(f"{level} {largest:.2g}" for level, largest in levels.items())
    raise UserError(
        f"not what was trained: {', '.join(names)}{hint}; from the same inputs as in training"
        f" come outputs off by {max(errors[key] for key in wrong):.2g} of the largest value"
        f" (allowed {allowed[wrong[0]]:.2g}; {summary})"
    )
