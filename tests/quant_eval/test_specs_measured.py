"""Every kind of spec through the walk: what is measured, on any number of ranks, and refused."""

from functools import cache

import numpy as np
import pytest
import torch

from base.errors import UserError
from base.ranks import ALONE
from quant_eval.group import LinearGroup
from quant_eval.measuring.losses import EvaluationSet
from quant_eval.measuring.walk import Quantized, Variant, walk
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from tests.quant_eval.gptq_reference import problem
from tests.quant_eval.models import open_model

CALIBRATION_NL = torch.randint(1, 320, (16, 48), generator=torch.Generator().manual_seed(1))
TEXT = [np.random.default_rng(2).integers(1, 320, length) for length in (40, 33, 25, 41, 17)]
DATA = EvaluationSet(TEXT, list(range(5)), list(range(5)), 0)


@pytest.fixture(scope="module")
def model(tiny) -> StreamedModel:
    return open_model(tiny("olmo2"))


def measured(model: StreamedModel, name: str) -> Quantized:
    spec = parse_spec(name)
    draw = CALIBRATION_NL if spec.needs_calibration else None
    (quantized,) = walk(model, [Variant(spec, draw)], DATA, ComputeSettings(), ALONE)
    return quantized


@cache
def divergence(model: StreamedModel, name: str) -> float:
    losses = measured(model, name).losses
    assert losses is not None
    return float(losses.kl.sum() / losses.tokens.sum())


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("w8a8", "w4a4-g16"),
        ("rtn-b4-g16", "w4a4-g16"),
        ("gptq-b4-g16", "gptq-b4-g16-a4-quarot"),
        ("a8-quarot", "w8a8-quarot"),
        ("kv8", "kv4"),
        ("kv4", "w4a4-g16-kv4"),
        ("kv8-quarot", "kv4-quarot"),
        ("mxfp8", "mxfp4"),
        ("nvfp4-a16", "nvfp4"),
        ("fp8", "fp8e5m2"),
        ("gptq-nvfp4-a16", "gptq-ternary-g16"),
        ("rtn-b2-g16-kv8", "binary-g16"),
        ("w8a8-baseq-smooth0.5-quarot", "w8a8-astatic"),
        ("qtip-b4-l8", "qtip-b2-l8"),
        ("qtip-b2-l12-kv8", "qtip-b2-l6-kv2"),
        ("quik-b2-g16-keep0.5", "gptq-b2-g16"),
        ("quik-b4-perchannel-keep0.5-a4", "quik-b4-perchannel-keep0-a4"),
        ("atom-b2-g16-keep0.5", "atom-b2-g16-keep0"),
        ("atom-b4-g16-keep0.5-a4", "atom-b4-g16-keep0-a2"),
        ("w4a4-g16-spinquant-blockwise-i2", "w2a2-g16-spinquant-blockwise-i2"),
        ("w4a4-g16-ostquant-blockwise-i2", "w2a2-g16-ostquant-blockwise-i2"),
        ("gptq-b3-g16-flatquant-blockwise-i2", "gptq-b2-g16-flatquant-blockwise-i2"),
        ("w4a4-g16-duquant", "w2a2-g16-duquant"),
    ],
)
def test_more_bits_or_fewer_casts_cost_less(model, better, worse):
    """Every spec here moves the loss: a cast that is left out would measure 0."""
    assert 0 < divergence(model, better) < divergence(model, worse)


@pytest.mark.parametrize("name", ["w8a8-kv8-quarot", "fp8", "kvfp8"])
def test_a_document_is_measured_alike_beside_others_and_alone(model, name):
    """Scales are of a token, or fixed: batch mates and padding change nothing."""
    spec = parse_spec(name)
    draw = CALIBRATION_NL if spec.needs_calibration else None
    whole = measured(model, name).losses
    alone = EvaluationSet(TEXT[1:3], [0, 1], [1, 2], 0)
    (fewer,) = walk(model, [Variant(spec, draw)], alone, ComputeSettings(batch_size=1), ALONE)
    assert whole is not None
    assert fewer.losses is not None
    # an activation that rounding noise of another kernel moves over a boundary moves a step
    assert fewer.losses.kl == pytest.approx(whole.kl[1:3], rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        *("rtn-b3-g32-asym", "gptq-b3-g32", "gptq-b3-perchannel-actorder-s16", "hqq-b4-g16"),
        *("fp8", "fp8-astatic", "fp8e5m2", "mxfp8", "mxfp4", "nvfp4", "ternary-g32", "binary-g32"),
        *("atom-b4-g32-keep0.2", "quik-b4-perchannel-keep0.2", "quik-b4-g32-keep1", "qtip-b2-l8"),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(name, value):
    """Weights of an input that Atom and QUIK keep, as every 37th is loud, and of another."""
    for feature in (37, 40):
        weight_OI, hessian_II = problem(num_outputs=32, num_inputs=64)
        weight_OI[3, feature] = value
        group = LinearGroup("w", [32], weight_OI, hessian_II, torch.float64, ALONE, seed=(0,))
        with pytest.raises(UserError, match=r"w: weights hold NaN or infinity.*; check the check"):
            parse_spec(name).round(group)
