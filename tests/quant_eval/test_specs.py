"""Names of specs: what they mean, and that nothing else is understood."""

import pytest
from pydantic import ValidationError

from base.errors import UserError
from quant_eval.specs import QuantSpec, parse_spec

GPTQ = {
    "method": "gptq",
    "symmetric": True,
    "order": "natural",
    "static_groups": False,
    "scales": "fp32",
}
MODEL = {
    "method": "gptqmodel",
    "symmetric": True,
    "order": "natural",
    "static_groups": False,
    "damping": 0.05,
}


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        (
            "rtn-b4-g128",
            None,
            {"method": "rtn", "bits": 4, "group_size": 128, "symmetric": True, "scales": "fp32"},
        ),
        (
            "rtn-b8-perchannel-asym-s16",
            None,
            {"method": "rtn", "bits": 8, "symmetric": False, "scales": "fp16"},
        ),
        ("gptq-b3-g32", None, GPTQ | {"bits": 3, "group_size": 32, "damping": 0.05}),
        (
            "gptq-b3-g32-sym-natural-damp0.05",
            "gptq-b3-g32",
            GPTQ | {"bits": 3, "group_size": 32, "damping": 0.05},
        ),
        (
            "gptq-b2-g64-asym-actorder-static-damp0.1",
            None,
            GPTQ
            | {"bits": 2, "group_size": 64, "symmetric": False, "order": "actorder", "damping": 0.1}
            | {"static_groups": True},
        ),
        (
            "gptq-b5-g64-groupaware",
            None,
            GPTQ | {"bits": 5, "group_size": 64, "order": "groupaware", "damping": 0.05},
        ),
        ("gptq-b4-perchannel-damp0", None, GPTQ | {"bits": 4, "damping": 0.0}),
        ("gptq-b4-g8-damp0.000001", None, GPTQ | {"bits": 4, "group_size": 8, "damping": 1e-6}),
        ("gptq-b4-g8-damp1", None, GPTQ | {"bits": 4, "group_size": 8, "damping": 1.0}),
        (
            "gptqmodel-b4-g128-paper",
            None,
            MODEL | {"bits": 4, "group_size": 128, "order": "actorder"},
        ),
        (
            "gptqmodel-b4-g128-actorder",
            "gptqmodel-b4-g128-paper",
            MODEL | {"bits": 4, "group_size": 128, "order": "actorder"},
        ),
        (
            "gptqmodel-b3-g64-actorder",
            None,
            MODEL | {"bits": 3, "group_size": 64, "order": "actorder"},
        ),
        (
            "gptaq-b3-g128",
            None,
            {
                "method": "gptaq",
                "bits": 3,
                "group_size": 128,
                "symmetric": True,
                "damping": 0.05,
                "alpha": 0.25,
            },
        ),
        ("awq-b4-g128", None, {"method": "awq", "bits": 4, "group_size": 128, "symmetric": False}),
        ("int8-t6", None, {"method": "int8", "bits": 8, "threshold": 6.0}),
        ("int8-b8-t0", "int8-t0", {"method": "int8", "bits": 8, "threshold": 0.0}),
        ("nf4-g64", None, {"method": "nf4", "bits": 4, "group_size": 64}),
    ],
)
def test_a_name_states_every_setting(text, name, values):
    spec = parse_spec(text)
    assert {
        option: value for option, value in spec.model_dump().items() if value is not None
    } == values
    assert spec.name == (name or text)
    assert parse_spec(spec.name) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gptq",
        "awq-b4-g32-actorder",
        "awq-b4-g32-s16",
        "int8",
        "int8-b4-t6",
        "int8-g64-t6",
        "nf4",
        "nf4-perchannel",
        "nf4-b3-g64",
        "gptqmodel-b5-g32",
        "gptqmodel-b4-g64-paper",
        "gptqmodel-b4-g128-paper-damp0.1",
        "gptq-b4-g128-paper",
        "gptq-b3-perchannel-groupaware",
        "gptq-b3-g32-groupaware-static",
        "gptaq-b3-g32-actorder",
        "gptq-b3-g32-alpha0.5",
        "gptq-b1-g32",
        "gptq-b9-g32",
        "gptq-b3",
        "gptq-b3-g0",
        "gptq-b3-g1",
        "gptq-b3-g-1",
        "gptq-3b-g32",
        "gptq-b3-g32-fast",
        "gptq-b3-g32-actorder-asym",
        "gptq-b3-g32-damp1.5",
        "gptq-b3-g32-damp-1",
        "gptq-b3-g32-damp0.0000001",
        "GPTQ-b3-g32",
        "gptq-b3-g32\n",
        "rtn-b3-g32-actorder",
        "rtn-b3-g32-natural",
        "rtn-b3-g32-damp0.05",
    ],
)
def test_other_names_are_refused_with_the_grammar_and_an_example(text):
    with pytest.raises(
        UserError,
        match=r"\(rtn\|gptq\|gptqmodel\|gptaq\|awq\|int8\|nf4\).*for example gptq-b3-g128",
    ):
        parse_spec(text)


def test_a_spec_is_frozen_and_consistent_however_it_is_made():
    with pytest.raises(ValidationError):
        parse_spec("rtn-b4-g32").bits = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="gptq needs"):
        QuantSpec(method="gptq", bits=4, group_size=32, order=None, damping=0.05)
    with pytest.raises(ValidationError, match="rtn does not take damping"):
        QuantSpec(method="rtn", bits=4, symmetric=True, scales="fp32", damping=0.05)
