"""The transformers model of a run, with initial weights that depend on seed and name alone."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from train.config import RunConfig
from train.families import hf_settings, parameter_shapes
from train.initialization import initial_parameter


def hf_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """The parameters by the names that transformers gives them in files: what train/families.py calls them.

    In memory transformers 5 has an `lm_head` in gpt_neox too, which is `embed_out` in every file.
    """
    renamed = model.config.model_type == "gpt_neox"
    return {
        name.replace("lm_head.", "embed_out.") if renamed else name: parameter
        for name, parameter in model.named_parameters()
    }


def build_model(run: RunConfig, config: dict[str, Any]) -> PreTrainedModel:
    """The model in fp32, initialised; at ZeRO stage 3 built and kept in partitions.

    Args:
        run: names the family and its sizes.
        config: DeepSpeed's configuration of the run.
    """
    sharded = run.zero.stage == 3
    # The end-of-text token does not enter the arithmetic.
    hf_config = AutoConfig.for_model(run.model.family, **hf_settings(run.model, run.data.sequence_length, 0))
    place: AbstractContextManager = deepspeed.zero.Init(config_dict_or_path=config) if sharded else nullcontext()
    with no_init_weights(), place:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation="sdpa"
        )
    parameters = hf_parameters(model)
    shapes = {name: tuple(each.ds_shape if sharded else each.shape) for name, each in parameters.items()}
    assert shapes == parameter_shapes(run.model), "transformers' model is not the one of train/families.py"
    for name, parameter in parameters.items():
        gathered: AbstractContextManager = (
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0) if sharded else nullcontext()
        )
        with gathered, torch.no_grad():
            parameter.copy_(initial_parameter(name, run.model, run.seed))
    if run.recompute == "layers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
