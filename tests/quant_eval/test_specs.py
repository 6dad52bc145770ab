"""Names of specs: what they mean, and that nothing else is understood."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from base.errors import UserError
from quant_eval.quantizer import QuantSpec
from quant_eval.quantizers import QUANTIZERS, described
from quant_eval.quantizers.libraries import AWQ
from quant_eval.quantizers.rtn import RTN
from quant_eval.specs import parse_spec

FOUR = {"bits": 4, "group_size": 128}
WHOLE = {"group_size": None}
W4A4 = FOUR | {"activations": "int4"}
W8A8 = WHOLE | {"bits": 8, "activations": "int8"}
NVFP4 = {"bits": 4, "format": "nvfp4", "group_size": 16}
THREE_MODEL = {"bits": 3, "group_size": 64, "order": "actorder"}


def stated(spec: QuantSpec) -> dict[str, Any]:
    """The settings that have no default, or another value."""
    fields = type(spec).model_fields
    return {
        name: value
        for name, value in spec
        if fields[name].is_required() or value != fields[name].default
    }


@pytest.mark.parametrize(
    ("name", "method", "values"),
    [
        ("rtn-b4-g128", "rtn", FOUR),
        ("rtn-b4-g128-asym-s16", "rtn", FOUR | {"symmetric": False, "scales": "fp16"}),
        (
            "gptq-b2-g64-asym-actorder-static-damp0.1",
            "gptq",
            {"bits": 2, "group_size": 64, "symmetric": False, "order": "actorder"}
            | {"static_groups": True, "damping": 0.1},
        ),
        ("gptq-b5-g64-groupaware", "gptq", {"bits": 5, "group_size": 64, "order": "groupaware"}),
        ("gptq-b4-perchannel-damp0", "gptq", WHOLE | {"bits": 4, "damping": 0.0}),
        ("gptq-b4-g128-damp0.000001", "gptq", FOUR | {"damping": 1e-6}),
        ("gptqmodel-b4-g128-paper", "gptqmodel", FOUR | {"order": "actorder"}),
        ("gptqmodel-b3-g64-actorder", "gptqmodel", THREE_MODEL),
        ("gptaq-b4-g128-alpha0.5", "gptaq", FOUR | {"alpha": 0.5}),
        ("awq-b4-g128-sym", "awq", FOUR | {"symmetric": True}),
        ("int8-t6", "int8", {"bits": 8, "threshold": 6.0}),
        ("nf4-g64", "nf4", {"bits": 4, "group_size": 64}),
        ("gptq-b4-g128-had", "gptq", FOUR | {"rotation": "had"}),
        ("w4a4-g128-asym-kv4", "rtn", W4A4 | {"symmetric": False, "kv": "int4"}),
        ("w8a8-smooth0.5", "rtn", W8A8 | {"smooth": 0.5}),
        ("rtn-b4-g128-afp8", "rtn", FOUR | {"activations": "fp8"}),
        ("w8a8-astatic", "rtn", W8A8 | {"static_activations": True}),
        ("nvfp4", "rtn", NVFP4 | {"activations": "nvfp4"}),
        ("nvfp4-a16", "rtn", NVFP4),
        ("nvfp4-a8-had", "rtn", NVFP4 | {"activations": "int8", "rotation": "had"}),
        ("gptq-nvfp4", "gptq", NVFP4 | {"activations": "nvfp4"}),
        ("fp8", "rtn", WHOLE | {"bits": 8, "format": "fp8", "activations": "fp8"}),
        ("ternary-g128", "rtn", {"bits": 2, "format": "ternary", "group_size": 128}),
        ("binary-perchannel", "rtn", WHOLE | {"bits": 1, "format": "binary"}),
        ("atom-b4-g128-keep0.03-a4", "atom", W4A4 | {"kept": 0.03}),
        ("quik-b4-perchannel-keep1", "quik", WHOLE | {"bits": 4, "kept": 1.0}),
        ("qtip-b3-l16", "qtip", {"bits": 3, "states": 16}),
        ("autoround-b4-g128-i50", "autoround", FOUR | {"iterations": 50}),
        ("kvfp8-quarot", "none", {"bits": 16, "kv": "fp8", "rotation": "quarot"}),
        (
            "a8-baseq-smooth0.5-had64",
            "none",
            {"bits": 16, "activations": "int8", "shift": True, "smooth": 0.5}
            | {"rotation": "had", "rotation_block": 64},
        ),
        (
            "w4a4-g128-spinquant-blockwise",
            "rtn",
            W4A4 | {"rotation": "spinquant-blockwise", "iterations": 100},
        ),
        ("w4a4-g128-quarot-fused", "rtn", W4A4 | {"rotation": "quarot-fused"}),
    ],
)
def test_a_name_states_every_setting(name, method, values):
    spec = parse_spec(name)
    assert (spec.method, stated(spec), spec.name) == (method, values, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gptq-b3-g32-sym-natural-damp0.05", "gptq-b3-g32"),
        ("gptqmodel-b4-g128-actorder", "gptqmodel-b4-g128-paper"),
        ("int8-b8-t0", "int8-t0"),
        ("rtn-b4-g128-a4-quarot", "w4a4-g128-quarot"),
        ("rtn-b8-perchannel-a8", "w8a8"),
    ],
)
def test_a_name_that_states_defaults_has_a_shorter_one(text, name):
    assert parse_spec(text) == parse_spec(name)
    assert parse_spec(text).name == name


def test_a_result_has_every_setting_of_every_quantizer_none_where_it_has_none():
    absent = [
        *("order", "static_groups", "alpha", "threshold", "states", "iterations", "scales"),
        *("activations", "kv", "smooth", "rotation", "rotation_block"),
    ]
    present = FOUR | {"method": "atom", "format": "int", "symmetric": True, "damping": 0.05}
    present |= {"kept": 0.03, "static_activations": False, "shift": False}
    assert described(parse_spec("atom-b4-g128-keep0.03")) == present | dict.fromkeys(absent)


def test_methods_have_names_titles_and_sources_of_their_own():
    for attribute in ("method", "title", "source"):
        assert len({getattr(each, attribute) for each in QUANTIZERS}) == len(QUANTIZERS)


def test_a_spec_is_frozen_and_consistent_however_it_is_made():
    with pytest.raises(ValidationError):
        parse_spec("rtn-b4-g32").bits = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="awq does not take rotation"):
        AWQ(bits=4, group_size=32, rotation="had")
    with pytest.raises(ValidationError, match="rtn needs iterations"):
        RTN(bits=4, group_size=32, activations="int4", rotation="spinquant-blockwise")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown spec"),
        ("gptq", "gptq needs its bits"),
        ("awq-b4-g32-actorder", "awq does not take order"),
        ("awq-b4-g32-s16", "awq does not take scales"),
        ("int8", "int8 needs threshold"),
        ("nf4", "nf4 needs a group size or perchannel"),
        ("nf4-perchannel", "nf4 needs a group size"),
        ("nf4-b3-g64", "nf4 takes 4 bits, not 3"),
        ("gptqmodel-b5-g32", "gptqmodel takes 2, 3, 4, 8 bits, not 5"),
        (
            "gptqmodel-b4-g64-paper",
            "paper stands for all settings of gptqmodel but bits, in groups",
        ),
        ("gptqmodel-b4-g128-paper-damp0.1", "'paper-damp0.1' is not understood"),
        ("gptq-b4-g128-paper", "'paper' is not understood"),
        ("gptq-b3-perchannel-groupaware", "give a group size, or use actorder"),
        ("gptq-b3-g32-groupaware-static", "groupaware keeps groups whole anyway"),
        ("gptq-b3-g32-alpha0.5", "gptq does not take alpha"),
        ("gptq-b1-g32", "gptq takes 2, 3, 4, 5, 6, 7, 8 bits, not 1"),
        ("gptq-b3-g1", "group_size: Input should be greater than or equal to 2"),
        ("gptq-b3-g-1", "'g-1' is not understood"),
        ("gptq-b3-g32-fast", "'fast' is not understood"),
        ("gptq-b3-g32-actorder-asym", "asym comes too late; keep the order of the parts"),
        ("gptq-b3-g32-damp1.5", "damping: Input should be less than or equal to 1"),
        ("gptq-b3-g32-damp0.0000001", "'damp0.0000001' is not understood"),
        ("GPTQ-b3-g32", "unknown spec 'GPTQ-b3-g32'"),
        ("gptq-b3-g32\n", "is not understood"),
        ("w4a4-had-quarot", "had and quarot do not compose; give one"),
        ("w4a4-quarot64", "'quarot64' is not understood"),
        ("w4a4-smooth0.5-ostquant-blockwise", "learns all of its transform"),
        ("w4a4-smooth0.5-quarot-fused", "give quarot"),
        ("w4a4-astatic", "give -a8 or -afp8"),
        ("w4a4-g128-i5", "rtn does not take iterations"),
        ("nvfp4-b4", "nvfp4 has 4 bits; leave -b out"),
        ("nvfp4-g32", "nvfp4 has its own groups"),
        ("fp8-asym", "leave -asym and -s16 out"),
        ("ternary", "ternary needs a group size or perchannel"),
        ("a16", "nothing is rounded"),
        ("kv4-had", "rotated by quarot"),
        ("kv9", "unknown spec"),
        ("gptq-b4-g128-baseq", "give -a, such as -a4"),
        ("gptq-b4-g128-s16-had", "-s16 is for weights alone"),
        ("awq-b4-g128-had", "awq does not take rotation"),
        ("gptqmodel-b4-g128-kv4", "gptqmodel does not take kv"),
        ("awq-nvfp4", "give rtn or gptq"),
        ("qtip-b4-l6", "4 bits need -l8 or more"),
        ("atom-b4-g128", "atom needs kept"),
        ("rtn-b3-g32-damp0.05", "rtn does not take damping"),
        ("int8-perchannel-t6", "int8 does not take group_size"),
    ],
)
def test_other_names_are_refused_with_the_reason_and_an_example(text, reason):
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        parse_spec(text)
    assert "'python -m quant_eval methods'" in str(caught.value)
    assert ("for example gptq-b3-g128 or w4a4-g128-quarot" in str(caught.value)) == (
        "did you mean gptq-b3-g32?" not in str(caught.value)
    )
