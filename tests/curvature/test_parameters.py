"""Flat vectors over a model of one process, and pictures of them by the textbook's definition.

`test_sharded.py` has the vectors of several processes.
"""

import math

import numpy as np
import pytest
import torch

import curvature.products.sketch
from curvature.products.parameters import ENTRIES_PER_SUM, Parameters, Probe, block_of, dot, is_norm
from curvature.products.probes import rademacher
from curvature.products.sketch import BUCKETS, ENTRIES_AT_ONCE, SIGNS_PROBE, CountSketch
from tests.curvature.conftest import dots_of, tiny_model


@pytest.fixture
def model():
    return tiny_model()


def test_vectors_run_in_the_order_of_the_models_own_parameters(model):
    parameters, names = Parameters(model), [name for name, _ in model.named_parameters()]
    theta_p = torch.nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(parameters.point(), theta_p)
    assert parameters.size == len(theta_p)
    assert list(parameters.weights) == list(parameters.shapes) == names


def test_parts_are_views_in_the_shapes_of_the_weights(model):
    parameters = Parameters(model)
    v_p = parameters.zeros()
    for number, (name, part) in enumerate(parameters.split(v_p).items()):
        assert part.shape == model.get_parameter(name).shape
        part.fill_(number)
    expected = [
        torch.full((weight.numel(),), float(number))
        for number, weight in enumerate(model.parameters())
    ]
    assert torch.equal(v_p, torch.cat(expected).double())


def test_a_vector_moves_the_model_and_puts_it_back(model):
    parameters, other = Parameters(model), tiny_model(std=0.1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    theta_p = parameters.point()
    parameters.move(Parameters(other).point())
    for name, weight in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    moved = {
        name: torch.full_like(weight, index)
        for index, (name, weight) in enumerate(parameters.weights.items())
    }
    parameters.move(theta_p, moved.__getitem__, -0.5)
    for index, (name, weight) in enumerate(model.named_parameters()):
        assert torch.equal(weight, before[name] - 0.5 * index)
    parameters.move(theta_p)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not any(
        torch.equal(theta_p[i : i + 8], Parameters(other).point()[i : i + 8]) for i in (0, 500)
    )


def test_a_vector_is_taken_from_whole_tensors_and_is_zero_elsewhere(model):
    parameters = Parameters(model)
    chosen = ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
    v_p = parameters.take({name: model.state_dict()[name] + 1 for name in chosen})
    for name, part in parameters.split(v_p).items():
        expected = model.state_dict()[name] + 1 if name in chosen else torch.zeros(part.shape)
        assert torch.equal(part, expected.double())


def test_a_tied_parameter_is_one(model):
    tied = Parameters(tiny_model(tie_word_embeddings=True))
    assert set(Parameters(model).weights) - set(tied.weights) == {"lm_head.weight"}


@pytest.mark.parametrize("length", [1, ENTRIES_PER_SUM["cpu"], ENTRIES_PER_SUM["cpu"] + 3])
def test_sums_of_fp32_vectors_are_exact_to_float64(length):
    """A large pair cancels among small ones, which fp32 would lose. math.fsum rounds once."""
    parameters = Parameters(torch.nn.Linear(length, 1, bias=False))
    a_p, b_p = torch.randn(2, length, generator=torch.Generator().manual_seed(0))
    if length > 1:
        a_p[0], a_p[-1], b_p[0], b_p[-1] = 2.0**20, -(2.0**20), 1.0, 1.0
    expected = math.fsum(x * y for x, y in zip(a_p.tolist(), b_p.tolist(), strict=True))
    size = math.fsum(abs(x * y) for x, y in zip(a_p.tolist(), b_p.tolist(), strict=True))
    sums = [
        *parameters.inner(torch.stack([a_p, -a_p]), b_p).tolist(),
        *dots_of(parameters, a_p, b_p).values(),
    ]
    assert sums == pytest.approx([expected, -expected, expected], abs=1e-13 * size)
    assert float(dot(a_p.view(1, -1), b_p.view(1, -1))) == pytest.approx(expected, abs=1e-13 * size)
    assert parameters.norm(a_p) == pytest.approx(
        math.sqrt(math.fsum(x * x for x in a_p.tolist())), rel=1e-13
    )


def test_what_ranks_hold_is_summed():
    """Two ranks with the same part, of which each asks the other: every sum doubles."""
    parameters = Parameters(torch.nn.Linear(3, 2), reduce=lambda summed: 2 * summed)
    a_p, b_p = torch.arange(8.0), torch.ones(8)
    assert parameters.inner(a_p[None], b_p).tolist() == [56.0]
    assert dots_of(parameters, a_p, b_p) == {"weight": 30.0, "bias": 26.0}
    assert parameters.norm(b_p) == 4.0


def test_blocks_cover_the_model(model):
    sizes = Parameters(model).block_sizes()
    layer = 4 * 8 * 8 + 3 * 8 * 12 + 4 * 8  # attention, MLP, norms of query, key and after each
    assert sizes == {"embedding": 24 * 8, "layer0": layer, "layer1": layer, "head": 8 + 24 * 8}


@pytest.mark.parametrize(
    ("name", "block", "norm"),
    [
        ("model.embed_tokens.weight", "embedding", False),
        ("gpt_neox.embed_in.weight", "embedding", False),
        ("model.layers.11.self_attn.q_norm.weight", "layer11", True),
        ("gpt_neox.layers.2.post_attention_layernorm.bias", "layer2", True),
        ("gpt_neox.layers.2.attention.query_key_value.bias", "layer2", False),
        ("model.norm.weight", "head", True),
        ("gpt_neox.final_layer_norm.weight", "head", True),
        ("lm_head.weight", "head", False),
        ("embed_out.weight", "head", False),
    ],
)
def test_names_tell_block_and_norm(name, block, norm):
    assert block_of(name) == block
    assert is_norm(name) == norm


def test_vectors_may_lie_elsewhere_than_the_model():
    """The meta device stands for another: vectors are made there, the model stays."""
    parameters = Parameters(torch.nn.Linear(3, 2), device=torch.device("meta"))
    assert parameters.zeros().device.type == parameters.probe(Probe(0, 0)).device.type == "meta"
    assert parameters.signs("weight", Probe(0, 0)).device.type == "cpu"


def picture(sketch: CountSketch, parameters: Parameters, v_p: torch.Tensor) -> torch.Tensor:
    parts = parameters.split(v_p)
    return sketch.whole(lambda name: sketch.part(name, parts[name]))


@pytest.mark.parametrize("at_once", [8, 16, ENTRIES_AT_ONCE])
def test_buckets_are_those_of_the_definition(monkeypatch, at_once):
    """Entry i times its sign goes to bucket i mod 8; tensors of 8 entries or fewer stay."""
    monkeypatch.setattr(curvature.products.sketch, "BUCKETS", 8)
    monkeypatch.setattr(curvature.products.sketch, "ENTRIES_AT_ONCE", at_once)
    parameters = Parameters(torch.nn.Linear(7, 5))
    v_p = torch.randn(parameters.size, generator=torch.Generator().manual_seed(0))
    sketch = CountSketch(parameters, Probe(3, 1))
    expected: list[float] = []
    for name, part in parameters.split(v_p).items():
        x = part.flatten().double().numpy()
        signs, along = (
            rademacher(name, 0, len(x), seed=3, probe=probe, dtype=torch.float64).numpy()
            for probe in (SIGNS_PROBE, 1)
        )
        buckets = np.zeros(min(len(x), 8))
        for index, entry in enumerate(signs * x):
            buckets[index % 8] += entry
        expected += [along @ x, *buckets]
    assert picture(sketch, parameters, v_p).tolist() == pytest.approx(expected, abs=1e-12)


def test_what_fits_its_buckets_is_kept_exactly():
    parameters = Parameters(torch.nn.Linear(30, 20))
    v_p = torch.randn(parameters.size, generator=torch.Generator().manual_seed(0))
    sketch = CountSketch(parameters, Probe(0, 0))
    picture_s = picture(sketch, parameters, v_p)
    assert sketch.norm(picture_s) == pytest.approx(float(v_p.double().norm()), rel=1e-12)
    along_p = parameters.probe(Probe(0, 0))
    assert sketch.dots(picture_s) == pytest.approx(dots_of(parameters, along_p, v_p), rel=1e-12)


@pytest.mark.parametrize("kind", ["all alike", "random", "one row", "the probe itself"])
def test_lengths_are_kept_within_the_stated_scatter(kind):
    """A million entries: 4 times sqrt(2 / 65536) of |x|^2, half of it of |x|."""
    parameters = Parameters(torch.nn.Linear(1024, 1000, bias=False))
    v_p = torch.ones(parameters.size)
    if kind == "random":
        v_p = torch.randn(parameters.size, generator=torch.Generator().manual_seed(0))
    elif kind == "one row":
        v_p[1024:] = 0.0
    elif kind == "the probe itself":
        v_p = parameters.probe(Probe(0, 0))
    sketch = CountSketch(parameters, Probe(0, 0))
    norm = sketch.norm(picture(sketch, parameters, v_p))
    assert norm == pytest.approx(float(v_p.double().norm()), rel=2 * math.sqrt(2 / BUCKETS))
