"""Names of specs: what they mean, and that nothing else is understood."""

import pytest
from pydantic import ValidationError

from quant_eval.specs import QuantSpec, parse_spec
from train.command import UserError


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("rtn-b4-g128", "rtn-b4-g128", ("rtn", 4, 128, True, None, None)),
        ("rtn-b8-perchannel-asym", "rtn-b8-perchannel-asym", ("rtn", 8, None, False, None, None)),
        ("gptq-b3-g32", "gptq-b3-g32", ("gptq", 3, 32, True, "natural", 0.05)),
        ("gptq-b3-g32-sym-natural-damp0.05", "gptq-b3-g32", ("gptq", 3, 32, True, "natural", 0.05)),
        ("gptq-b2-g64-asym-actorder-damp0.1", None, ("gptq", 2, 64, False, "actorder", 0.1)),
        ("gptq-b4-perchannel-damp0", None, ("gptq", 4, None, True, "natural", 0.0)),
        ("gptq-b4-g8-damp0.000001", None, ("gptq", 4, 8, True, "natural", 1e-6)),
        ("gptq-b4-g8-damp1", None, ("gptq", 4, 8, True, "natural", 1.0)),
    ],
)
def test_a_name_states_every_setting(text, name, values):
    spec = parse_spec(text)
    assert tuple(spec.model_dump().values()) == values
    assert spec.name == (name or text)
    assert parse_spec(spec.name) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gptq",
        "awq-b4-g32",
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
    with pytest.raises(UserError, match=r"\(rtn\|gptq\).*for example gptq-b3-g128"):
        parse_spec(text)


def test_a_spec_is_frozen_and_consistent_however_it_is_made():
    with pytest.raises(ValidationError):
        parse_spec("rtn-b4-g32").bits = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="belong to gptq"):
        QuantSpec(method="gptq", bits=4, group_size=32, order=None, damping=0.05)
