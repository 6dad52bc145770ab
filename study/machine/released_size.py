"""The size of a released model by its config.json, before a weight is fetched."""

import json
from functools import cache
from typing import TYPE_CHECKING

from study.machine.needs import model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BYTES = {"bfloat16": 2, "float16": 2}  # of a number; 4 of any other


@cache
def stored_bytes(config: str) -> int:
    """Return the bytes of the weights in the number format that config.json names.

    Without one they are in fp32, which is the library's default.
    """
    content = json.loads(config)
    dtype = str(content.get("dtype") or content.get("torch_dtype"))
    parameters = sum(weight.numel() for weight in _model(config).parameters())
    return parameters * BYTES.get(dtype, 4)


@cache
def linear_parameters(config: str) -> int:
    """Return the parameters of the linears in the decoder blocks."""
    # It imports transformers, see below.
    from quant_eval.cost import Shape

    shape = Shape.of(model_config(config))
    return shape.layers * shape.weights


@cache
def multiplied_parameters(config: str) -> int:
    """Return the parameters as `train.model.config.multiplied_parameters` counts them."""
    model = _model(config)
    whole = sum(weight.numel() for weight in model.parameters())
    if model.config.tie_word_embeddings:
        return whole
    looked_up = sum(weight.numel() for weight in model.get_input_embeddings().parameters())
    return whole - looked_up


@cache
def _model(config: str) -> "PreTrainedModel":
    # It imports transformers, which takes seconds that a study on the CPU need not spend.
    from ckpt_tools.hf.forward import empty_model

    return empty_model(model_config(config))
