"""A spec that the sizes of a model cannot have is refused where a study is read, by the reason that
its measurement would give once the model is trained.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig

from base.errors import UserError
from ckpt_tools.hf.forward import empty_model
from quant_eval.measuring.sequential import check_spec
from quant_eval.model.families import family_of
from quant_eval.specs import parse_spec
from study.definition import Study
from study.measurements.sizes import misfits
from tests.study.ablation import tiny
from train.model.config import ModelConfig
from train.model.families import hf_settings
from train.run.config import RunConfig

SPECS = (
    *("gptq-b3-g48", "rtn-b3-g32", "gptq-b3-perchannel", "qtip-b2", "nf4-g64", "autoround-b4-g16"),
    *("rtn-b4-g16-amxfp4", "mxfp4", "nvfp4", "w4a4-g16", "rtn-b4-g16-had", "rtn-b4-g16-had32"),
    *("w4a4-g16-quarot", "w4a4-g16-quarot-fused", "w4a4-g16-duquant", "w4a4-g16-duquant48"),
    *("rtn-b4-g16-kv4-quarot", "none-kv4-quarot", "w4a4-g16-spinquant-blockwise"),
)
SIZES: dict[str, dict[str, Any]] = {
    "olmo2": {"family": "olmo2", "hidden_size": 96, "intermediate_size": 288},
    "odd": {"family": "olmo2", "hidden_size": 80, "intermediate_size": 208},
    "llama": {"family": "llama", "hidden_size": 64, "intermediate_size": 112},
    "gpt_neox": {
        **{"family": "gpt_neox", "hidden_size": 64, "intermediate_size": 256},
        **{"rotary_fraction": 0.25, "initializer": "normal"},
    },
}


def model(sizes: dict[str, Any]) -> ModelConfig:
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
    }
    return ModelConfig(vocab_size=320, **heads, **sizes)


def run_of(sizes: dict[str, Any]) -> RunConfig:
    return tiny().trained[0].model_copy(update={"model": model(sizes)})


def refused_of_study(run: RunConfig, spec: str) -> str:
    quantization = tiny().quantization.model_copy(
        update={"specs": (spec,), "methods": (), "by_block": ()}
    )
    return next(misfits(run, quantization, None, None), "").partition(f"spec {spec}: ")[2]


def refused_of_model(run: RunConfig, spec: str) -> str:
    """The reason that quant_eval gives of the model as transformers builds it."""
    config = AutoConfig.for_model(run.model.family, **hf_settings(run.model, 64, 0))
    linears = {
        name: module
        for name, module in empty_model(config).named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    stand_in: Any = SimpleNamespace(
        config=config, family=family_of(config), empty_linears=lambda: linears
    )
    try:
        check_spec(stand_in, parse_spec(spec))
    except UserError as error:
        return str(error).partition(f"spec {spec}: ")[2]
    return ""


@pytest.mark.parametrize("name", SIZES)
def test_a_study_refuses_what_the_measurement_would(name):
    run = run_of(SIZES[name])
    reasons = {spec: refused_of_study(run, spec) for spec in SPECS}
    assert reasons == {spec: refused_of_model(run, spec) for spec in SPECS}
    assert any(reasons.values())
    assert not all(reasons.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"quantization": {"methods": ["gptq-b3-g36"]}},
            "run lr1e-3 cannot be measured with spec gptq-b3-g36: group size 36 does not divide the"
            " 96 input features of model.layers.0.self_attn.q_proj; choose a divisor",
        ),
        ({"quantization": {"by_block": ["rtn-b3-g36"]}}, "cannot be measured with spec rtn-b3-g36"),
        ({"tasks": {"specs": ["rtn-b3-g36"]}}, "cannot be measured with spec rtn-b3-g36"),
        (
            {"curvature": {"sequence_length": 129}},
            r"curvature.sequence_length 129 is beyond the context of 128 tokens of run lr1e-3",
        ),
    ],
    ids=["method", "by block", "tasks", "context"],
)
def test_a_study_is_refused_before_anything_is_trained(change, reason):
    content = tiny().model_dump(mode="json")
    for key, values in change.items():
        content[key] = (content[key] or {}) | values
    with pytest.raises(ValidationError, match=reason):
        Study.model_validate(content)
