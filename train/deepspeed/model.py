"""The transformers model of a run, with initial weights that depend on seed and name alone."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from train.model.families import hf_settings, parameter_shapes
from train.model.initialization import initial_parameter
from train.run.config import RunConfig


def hf_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """Return the parameters by their names in files, those of train/model/families.py.

    In memory transformers 5 has an `lm_head` in gpt_neox too, which is `embed_out` in every file.
    """
    renamed = model.config.model_type == "gpt_neox"
    return {
        name.replace("lm_head.", "embed_out.") if renamed else name: parameter
        for name, parameter in model.named_parameters()
    }


def build_model(run: RunConfig) -> PreTrainedModel:
    """Return the initialised model of a run in fp32."""
    # The end-of-text token does not enter the arithmetic.
    hf_config = AutoConfig.for_model(
        run.model.family, **hf_settings(run.model, run.data.sequence_length, 0)
    )
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation="sdpa"
        )
    parameters = hf_parameters(model)
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    assert shapes == parameter_shapes(run.model), "not the model of train/model/families.py"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(initial_parameter(name, run.model, run.seed))
    if run.recompute == "layers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
