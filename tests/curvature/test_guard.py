"""The start-up guard: right products pass, wrong ones are refused, by the stated limits."""

import pytest
import torch

import curvature.dual.blocks
from base.errors import UserError
from base.ranks import ALONE
from curvature.dual.numbers import Dual
from curvature.products.exact import DualHessian, HessianProduct, SketchedProduct
from curvature.products.guard import check_product, difference_product
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from curvature.products.sketch import CountSketch
from tests.curvature.conftest import random_tokens, tiny_model
from tests.curvature.on_ranks import ORDINARY


def check(curved: CurvedModel, dtype: str = "fp32", sequences: int = 2) -> dict:
    """The guard as a measurement calls it."""
    tokens_BS1, sketch = random_tokens(sequences), sketch_of(curved)
    product = DualHessian(curved).sketched(tokens_BS1, sketch)
    return check_product(product, difference_product(curved, tokens_BS1, sketch), sketch, dtype)


def sketch_of(curved: CurvedModel) -> CountSketch:
    return CountSketch(curved.parameters, Probe(0, 0))


def pictured(curved: CurvedModel, product: HessianProduct, sketch: CountSketch) -> SketchedProduct:
    parts = curved.parameters.split(product.hv_p)
    picture_s = sketch.whole(lambda name: sketch.part(name, parts[name]))
    return SketchedProduct(product.loss, picture_s)


@pytest.fixture(scope="module")
def curved() -> CurvedModel:
    return CurvedModel(tiny_model(), ranks=ALONE)


@pytest.fixture(scope="module")
def right(curved) -> HessianProduct:
    return DualHessian(curved).product(random_tokens(), curved.parameters.probe(Probe(0, 0)))


def judged(curved, right: HessianProduct, wrong: HessianProduct, dtype: str = "fp32") -> dict:
    """The guard's figures for one result held against another."""
    sketch = sketch_of(curved)
    picture, other = (pictured(curved, each, sketch) for each in (wrong, right))
    return check_product(picture, other, sketch, dtype)


def test_a_right_product_passes_with_room_to_spare():
    figures = check(CurvedModel(tiny_model(torch.float32), ranks=ALONE))
    assert figures["loss_relative_difference"] < 1e-6
    assert 0 < figures["product_relative_difference"] < 1e-3
    assert (
        figures["product_relative_difference"]
        < figures["worst_tensor"]["relative_difference"]
        < 0.1
    )


def test_bf16_passes_by_its_own_limits_and_not_by_those_of_fp32():
    curved = CurvedModel(tiny_model(torch.float32, **ORDINARY), ranks=ALONE, dtype=torch.bfloat16)
    # 16 whose v'Hv is large: of a random model it cancels in most batches to what bf16 rounds off
    assert 1e-3 < check(curved, "bf16", 16)["product_relative_difference"] < 0.05
    with pytest.raises(UserError, match="refusing to measure"):
        check(curved)


def test_another_forward_is_refused():
    model = tiny_model(torch.float32)
    curved = CurvedModel(model, ranks=ALONE)
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(UserError, match="refusing to measure: the product's loss"):
        check(curved)


def test_a_wrong_product_of_the_right_loss_is_refused(monkeypatch):
    """A derivative rule with one term missing: every value is right, every shape is right."""

    def wrong_swiglu(gate: Dual, up: Dual) -> Dual:
        sigmoid = torch.sigmoid(gate.value)
        silu = Dual(gate.value * sigmoid, sigmoid * gate.tangent)
        return silu * up

    monkeypatch.setattr(curvature.dual.blocks, "swiglu", wrong_swiglu)
    with pytest.raises(UserError, match=r"refusing to measure: Hv in fp32 is off .*limit 0.01"):
        check(CurvedModel(tiny_model(torch.float32), ranks=ALONE))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("factor", "passes"), [(1.009, True), (0.991, True), (1.011, False), (0.989, False)]
)
def test_the_line_is_at_one_percent(curved, right, factor, passes, dtype):
    """In bf16 that of v'Hv, which a scaled product moves as far as the vector."""
    scaled = right._replace(hv_p=factor * right.hv_p)
    if passes:
        figures = judged(curved, right, scaled, dtype)
        assert figures["product_relative_difference"] == pytest.approx(abs(factor - 1))
        assert figures["worst_tensor"]["relative_difference"] == pytest.approx(abs(factor - 1))
    else:
        with pytest.raises(UserError, match="refusing"):
            judged(curved, right, scaled, dtype)


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 0.01), ("bf16", 0.05)])
def test_an_error_that_the_quadratic_form_does_not_see_is_refused_too(curved, right, dtype, limit):
    """Orthogonal to v: v'Hv is right, the vector wrong by a tenth more or less than the limit."""
    v_p = curved.parameters.probe(Probe(0, 0))
    aside_p = curved.parameters.probe(Probe(0, 1))
    aside_p -= v_p * (aside_p @ v_p) / (v_p @ v_p)
    aside_p *= right.hv_p.norm() / aside_p.norm()
    near, far = (right._replace(hv_p=right.hv_p + share * limit * aside_p) for share in (0.9, 1.1))
    assert judged(curved, right, near, dtype)["product_relative_difference"] == pytest.approx(
        0.9 * limit
    )
    with pytest.raises(UserError, match=f"limit {limit:g}"):
        judged(curved, right, far, dtype)


def test_an_error_in_one_tensor_is_named(curved, right):
    moved = {name: part.clone() for name, part in curved.parameters.split(right.hv_p).items()}
    moved["model.layers.1.self_attn.k_proj.weight"][0] *= 1.001
    wrong = right._replace(hv_p=curved.parameters.take(moved))
    assert (
        judged(curved, right, wrong)["worst_tensor"]["name"]
        == "model.layers.1.self_attn.k_proj.weight"
    )


@pytest.mark.parametrize(
    "wrong", [{"loss": float("nan")}, {"hv_p": torch.nan}, {"hv_p": torch.inf}]
)
def test_what_is_not_a_number_is_refused(curved, right, wrong):
    if "hv_p" in wrong:
        wrong = {"hv_p": right.hv_p + wrong["hv_p"]}
    with pytest.raises(UserError, match="refusing"):
        judged(curved, right, right._replace(**wrong))


def test_a_product_that_vanishes_proves_nothing_and_is_refused(curved, right):
    nothing = right._replace(hv_p=torch.zeros_like(right.hv_p))
    with pytest.raises(UserError, match="refusing"):
        judged(curved, nothing, nothing)
