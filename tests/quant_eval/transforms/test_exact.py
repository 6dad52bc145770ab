"""With nothing rounded, a transformed model is the model: every transform on every family."""

from functools import cache

import pytest

from base.errors import UserError
from quant_eval.specs import parse_spec
from quant_eval.transforms import duquant
from quant_eval.transforms.fitting import fit_transform
from quant_eval.transforms.steps import Transform
from tests.quant_eval.models import ARCHITECTURES
from tests.quant_eval.transforms.linears import (
    difference,
    inputs_of,
    load,
    logits,
    normal,
    rotated_mlp_inputs,
    transformed,
)

TRANSFORMS = [
    "had",
    "had8",
    "rhad",
    "duquant8",
    "quarot",
    "quarot-fused",
    "smooth0.5",
    "baseq-smooth0.5-quarot",
    "baseq-smooth0.5-duquant8",
    "baseq-smooth0.7-rhad",
]
CENTERED = "R1 cannot be fused on gpt_neox: LayerNorm subtracts the mean; give quarot"
CLIPPED = "R2 cannot be fused on olmo with clip_qkv, which clips the values; give had"
REFUSED = {
    ("olmo2", "quarot-fused"): "R1 cannot be fused on olmo2: its norms follow the linears; give",
    ("olmo3", "quarot-fused"): "R1 cannot be fused on olmo3: its norms follow the linears; give",
    ("olmo", "quarot-fused"): CLIPPED,
    ("olmo", "quarot"): CLIPPED,
    ("gpt_neox", "quarot-fused"): CENTERED,
    ("gpt_neox-sequential", "quarot-fused"): CENTERED,
}


@pytest.fixture(scope="module")
def models(tiny):
    """Models by name, with what their linears read and their logits."""

    @cache
    def get(name):
        model = load(tiny(name))
        return model, inputs_of(model), logits(model)

    return get


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_model(models, name, transform, monkeypatch):
    monkeypatch.setattr(duquant, "MOST_ROTATIONS", 4)  # as many would be as exact
    model, read, reference = models(name)
    spec = parse_spec(f"w4a4-g8-{transform}")
    if (name, transform) in REFUSED:
        with pytest.raises(UserError) as caught:
            transformed(model, read, spec)
        assert REFUSED[name, transform] in str(caught.value)
        return
    changed = transformed(model, read, spec)
    # the bound; fp32 products of 32 to 64 features in another order
    assert difference(changed, reference) <= 1e-5


def test_the_linears_do_compute_in_another_basis(models):
    """Otherwise the test above could not fail."""
    model, read, reference = models("llama")
    changed = transformed(model, read, parse_spec("w4a4-g8-rhad"))
    for layer in changed.model.layers:
        layer.mlp.down_proj.inputs.transform = Transform()
    assert difference(changed, reference) > 0.1


@pytest.mark.parametrize("transform", ["had", "rhad", "duquant8", "smooth0.5", "smooth0.5-had"])
def test_objective_of_rounding_is_the_same_in_both_bases(transform):
    """tr(dW H dW^T) of a change dW = dW' T^-1, with outliers of 30 in the inputs."""
    x_NI = normal(500, 48, seed=0)
    x_NI[:, 5] *= 30
    hessian_II = x_NI.T @ x_NI / len(x_NI)
    inputs = {"hessian_II": hessian_II, "largest_I": x_NI.abs().amax(0)}
    spec = parse_spec(f"rtn-b4-g8-{transform}")
    places = rotated_mlp_inputs(spec.rotation, 48, block=8)
    fitted = fit_transform(spec, "mlp_in", places, normal(8, 48, seed=1).float(), 3, **inputs)
    change_OI = normal(8, 48, seed=2)
    inside = change_OI @ fitted.hessian(hessian_II) @ change_OI.T
    outside = fitted.restored(change_OI) @ hessian_II @ fitted.restored(change_OI).T
    assert abs(float(inside.trace() / outside.trace()) - 1) < 1e-8
