"""Products of every architecture against the dense float64 Hessian of HF's own code.

Shapes: B sequences, S positions of a sequence, P parameters.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from base.ranks import ALONE
from curvature.products.guard import difference_product
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from curvature.products.sketch import CountSketch
from tests.curvature.architectures.variants import VARIANTS
from tests.curvature.conftest import (
    Dense,
    dense_hessian,
    differentiable_gradient,
    dual_hessian,
    gaussian,
    random_tokens,
    relative,
    tiny_model,
)
from train.model.families import FAMILIES

# Initial weights of std 0.05 and width 64: the rounding of fp32 is what it is in use.
ORDINARY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
ORDINARY |= {"std": 0.05}


class Variant(NamedTuple):
    """A configuration, a batch, and the dense Hessian of its float64 model."""

    config: dict[str, Any]
    tokens_BS1: Tensor
    dense: Dense


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request) -> Variant:
    config, tokens_BS1 = VARIANTS[request.param], random_tokens()
    return Variant(config, tokens_BS1, dense_hessian(tiny_model(**config), tokens_BS1))


def ordinary(config: dict[str, Any], dtype: torch.dtype):
    # 2.5 standard deviations of queries there too
    clip = {"clip_qkv": 1.0} if "clip_qkv" in config else {}
    return tiny_model(dtype, **(config | ORDINARY | clip))


def test_random_vector_in_float64(variant):
    hessian, dense = dual_hessian(tiny_model(**variant.config)), variant.dense
    v_P = gaussian(hessian.parameters.size)
    loss, slope, hv_P = hessian.product(variant.tokens_BS1, v_P)
    assert relative(hv_P, dense.hessian_PP @ v_P) < 1e-10
    assert loss == pytest.approx(dense.loss, rel=1e-12)
    assert slope == pytest.approx(
        float(dense.gradient_P @ v_P), abs=1e-12 * float(dense.gradient_P.norm() * v_P.norm())
    )


def test_columns_of_every_tensor(variant):
    """Unit vectors reach every tensor's ends alone: none hides behind a large one's norm."""
    hessian, hessian_PP = dual_hessian(tiny_model(**variant.config)), variant.dense.hessian_PP
    sizes = torch.tensor([shape.numel() for shape in hessian.parameters.shapes.values()])
    ends = sizes.cumsum(0)
    assert ends[-1] == len(hessian_PP)
    for column in sorted({*(ends - sizes).tolist(), *(ends - 1).tolist()}):
        unit_P = torch.zeros(len(hessian_PP), dtype=torch.float64)
        unit_P[column] = 1
        hv_P = hessian.product(variant.tokens_BS1, unit_P).hv_p
        assert (hv_P - hessian_PP[column]).abs().max() < 1e-12 * hessian_PP.abs().max()


def test_streamed_form_is_that_of_the_dense_hessian(variant):
    """Tensor by tensor, and with memory saved in every way at once."""
    options = {"checkpointing": True, "queries_per_chunk": 2, "tokens_per_chunk": 5}
    hessian = dual_hessian(tiny_model(**variant.config), **options)
    parameters, tokens_BS1 = hessian.parameters, variant.tokens_BS1
    v_P = gaussian(parameters.size, seed=1)
    loss, slope, hv_P = hessian.product(tokens_BS1, v_P)
    plain = dual_hessian(tiny_model(**variant.config)).product(tokens_BS1, v_P)
    assert relative(hv_P, plain.hv_p) < 1e-13
    assert [loss, slope] == pytest.approx([plain.loss, plain.slope], rel=1e-13)
    quadratic = hessian.quadratic(tokens_BS1, v_P)
    assert [quadratic.loss, quadratic.slope] == [loss, slope]
    size = float(v_P.norm() * hv_P.norm())
    for name, v in parameters.split(v_P).items():
        streamed = quadratic.dots[name]
        assert streamed == pytest.approx(
            float((v * parameters.split(hv_P)[name]).sum()), abs=1e-14 * size
        )
        expected_P = variant.dense.hessian_PP @ v_P
        assert streamed == pytest.approx(
            float((v * parameters.split(expected_P)[name]).sum()), abs=1e-12 * size
        )


def test_lower_precision_in_a_model_of_ordinary_scale(variant):
    """Measured of all architectures: fp32 1.0e-6 or less, bf16 products 3.1e-2 or less."""
    exact = dual_hessian(ordinary(variant.config, torch.float64))
    v_P = exact.parameters.probe(Probe(0, 0))
    loss, slope, hv_P = exact.product(variant.tokens_BS1, v_P)
    gradient_P = differentiable_gradient(
        ordinary(variant.config, torch.float64), variant.tokens_BS1
    )[1].detach()
    for dtype, error, loss_error in ((torch.float32, 3e-6, 1e-6), (torch.bfloat16, 5e-2, 2e-3)):
        hessian = dual_hessian(ordinary(variant.config, torch.float32), dtype=dtype)
        product = hessian.product(variant.tokens_BS1, v_P.float())
        assert product.hv_p.dtype == torch.float32
        assert relative(product.hv_p, hv_P) < error
        assert product.loss == pytest.approx(loss, rel=loss_error)
        assert product.slope == pytest.approx(slope, abs=error * float(gradient_P.norm()))


def test_differences_of_gradients_agree(variant):
    """In pictures that keep every entry of so small a tensor, times a sign."""
    model, hessian_PP = tiny_model(torch.float32, **variant.config), variant.dense.hessian_PP
    curved = CurvedModel(model, ranks=ALONE)
    sketch = CountSketch(curved.parameters, Probe(0, 0))
    product = difference_product(curved, variant.tokens_BS1, sketch)
    exact_P = hessian_PP @ curved.parameters.probe(Probe(0, 0)).double()
    exact = curved.parameters.split(exact_P.float())
    exact_s = sketch.whole(lambda name: sketch.part(name, exact[name]))
    assert relative(product.picture_s, exact_s) < 1e-3
    assert product.loss == pytest.approx(variant.dense.loss, rel=1e-6)


def test_every_architecture_has_a_variant_and_its_name():
    assert {config["model_type"] for config in VARIANTS.values()} == set(FAMILIES)
    models = [tiny_model(**config) for config in VARIANTS.values()]
    # transformers has no class for opensci
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {"opensci": "OpensciForCausalLM"}
    assert {type(model).__name__ for model in models} == {classes[name] for name in FAMILIES}


def test_variants_do_what_their_names_say():
    """Some queries are clipped, some not; rotary tables are scaled, partial, or left out; windows
    hide the first token from the last one.
    """
    clipped, yarn, partial, partly_rotary = (
        tiny_model(**VARIANTS[name])
        for name in ("olmo-clipped", "llama-biases-yarn", "gpt_neox", "smollm3-tied")
    )
    beyond: list[float] = []
    queries = clipped.model.layers[1].self_attn.q_proj
    queries.register_forward_hook(
        lambda _module, _read, x: beyond.append(float((x.abs() > 2.5).double().mean()))
    )
    clipped(random_tokens()[:, :-1])
    assert 0 < beyond[0] < 0.5
    assert yarn.model.rotary_emb.attention_scaling != 1
    assert (
        2 * len(partial.gpt_neox.rotary_emb.inv_freq)
        < partial.gpt_neox.layers[0].attention.head_size
    )
    assert [bool(layer.self_attn.use_rope) for layer in partly_rotary.model.layers] == [True, False]
    for name in ("olmo3", "mistral-windows", "qwen3-windows"):
        model, tokens = tiny_model(**VARIANTS[name]), random_tokens()[:1]
        inputs = model.get_input_embeddings()(tokens).requires_grad_()
        model.config.num_hidden_layers, layers = 1, model.model.layers
        # the layer in windows alone
        model.model.layers = layers[-1:] if name == "qwen3-windows" else layers[:1]
        model.config.layer_types = ["sliding_attention"]
        hidden = model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        (by_input,) = torch.autograd.grad(hidden[0, -1].sum(), inputs)
        assert [bool(row.any()) for row in by_input[0]] == [False] * 5 + [True] * 3
