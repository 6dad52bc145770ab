"""The core of curvature on ranks that share a model (FSDP2), against one that holds it."""

import json
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from base.ranks import ALONE
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from tests.curvature import on_ranks
from tests.curvature.allocated import most_allocated, most_of_python
from tests.curvature.conftest import random_tokens, relative, tiny_model
from tests.runs import ranks, succeed

EXACT = [
    f"tied={tied} checkpointing={checkpointing} batch={batch}"
    for tied, checkpointing in on_ranks.VARIANTS
    for batch in on_ranks.BATCHES
]


class Shared(NamedTuple):
    """Results of ranks: parts of vectors joined, by vector and tensor; figures of each."""

    vectors: dict[str, dict[str, Tensor]]
    figures: list[dict[str, Any]]


def joined(parts: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    vectors: dict[str, dict[str, Tensor]] = {}
    for key in parts[0]:
        label, name = key.split("|")
        vectors.setdefault(label, {})[name] = torch.cat([part[key] for part in parts])
    return vectors


@pytest.fixture(scope="module")
def alone() -> Shared:
    """One process, its parameters whole."""
    record = on_ranks.everything(ALONE, "none")
    record.figures["memory"] = on_ranks.memory(ALONE, "none")
    return Shared(joined([record.parts]), [record.figures])


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.stress), 3])
def shared(request, tmp_path_factory) -> Shared:
    """Processes over gloo that hold a part of every parameter each; a hang ends in a timeout."""
    out = tmp_path_factory.mktemp("shared")
    succeed(ranks(request.param, "tests.curvature.on_ranks", str(out)))
    stems = [out / f"{request.param}-{rank}" for rank in range(request.param)]
    figures = [json.loads(stem.with_suffix(".json").read_text()) for stem in stems]
    return Shared(joined([load_file(stem.with_suffix(".safetensors")) for stem in stems]), figures)


def vector(run: Shared, alone: Shared, label: str) -> Tensor:
    """A vector in the order of the parameters; files do not keep it."""
    return torch.cat([run.vectors[label][name].flatten() for name in alone.vectors[label]])


@pytest.mark.parametrize(
    "label", ["probe", "probe of norms", "taken", "taken of norms", "point", "moved"]
)
def test_joined_parts_are_the_whole_vector_to_the_bit(shared, alone, label):
    whole = vector(alone, alone, label)
    assert len(whole) == alone.figures[0]["sizes"][0]
    assert torch.equal(vector(shared, alone, label), whole)


def test_sums_over_the_ranks_are_those_of_the_whole_vectors(shared, alone):
    probe, taken, point = (vector(alone, alone, label) for label in ("probe", "taken", "point"))
    dots = {
        name: float((t * alone.vectors["point"][name]).sum())
        for name, t in alone.vectors["taken"].items()
    }
    for figures in (*shared.figures, *alone.figures):
        assert figures["inner"] == pytest.approx(
            [float(probe @ point), float(taken @ point)], rel=1e-12
        )
        assert figures["norm"] == pytest.approx(float(taken.norm()), rel=1e-12)
        assert figures["dots"] == pytest.approx(dots, rel=1e-12, abs=1e-12)
        assert figures["sizes"] == alone.figures[0]["sizes"]


def test_every_rank_knows_the_same_numbers(shared):
    first = shared.figures[0]
    for figures in shared.figures[1:]:
        own = {"alive", "memory", "replicated"}
        assert {key: value for key, value in figures.items() if key not in own} == {
            key: value for key, value in first.items() if key not in own
        }


def quadratic_of(figures: dict[str, Any]) -> float:
    return sum(figures["dots"].values())


@pytest.mark.parametrize("label", EXACT)
def test_products_in_float64(shared, alone, label):
    """v'Hv may cancel to a thirtieth of what it is summed from, hence 1e-12 of that."""
    values, expected = shared.figures[0][label], alone.figures[0][label]
    scale = sum(map(abs, expected["dots"].values()))
    for way in ("of the product", "of the form", "of the probe"):
        assert values[way] == pytest.approx(expected[way], rel=1e-12)
    for way in ("dots", "dots of the probe"):
        assert values[way] == pytest.approx(expected["dots"], rel=1e-12, abs=1e-12 * scale)
    assert relative(vector(shared, alone, label), vector(alone, alone, label)) < 1e-12


def test_products_in_fp32(shared, alone):
    """A model of ordinary scale: width 64, weights of standard deviation 0.03."""
    values, expected = shared.figures[0]["fp32"], alone.figures[0]["fp32"]
    assert quadratic_of(values) == pytest.approx(quadratic_of(expected), rel=1e-6)
    assert values["of the form"] == pytest.approx(expected["of the form"], rel=1e-6)
    assert relative(vector(shared, alone, "fp32"), vector(alone, alone, "fp32").double()) < 1e-6


def test_bf16_computation_with_fp32_shards(shared, alone):
    """As far apart as roundings take it: kernels sum other numbers of rows in another order, and
    a sum of gradients is
    rounded on every rank. Less than what bf16 itself is off by, and no further off.
    """
    values, expected = shared.figures[0]["bf16"], alone.figures[0]["bf16"]
    assert values["of the form"] == pytest.approx(expected["of the form"], rel=2**-9)
    exactly = quadratic_of(alone.figures[0]["fp32"])
    for figures in (values, expected):  # each off on its own: what is summed cancels in part
        assert quadratic_of(figures) == pytest.approx(exactly, rel=2**-6)
    exact = vector(alone, alone, "fp32").double()
    single, several = vector(alone, alone, "bf16"), vector(shared, alone, "bf16")
    assert 0.002 < relative(single, exact) < 0.05
    assert relative(several, single.double()) < relative(single, exact)
    assert relative(several, exact) < 1.1 * relative(single, exact)


def test_losses_by_the_models_own_forward(shared, alone):
    """Losses of the batch, by a criterion of its rows, at a moved point, and back; fp32 rounds."""
    here, weighted, there, back = alone.figures[0]["plain losses"]
    assert abs(there - here) > 1e-3
    assert here == back != weighted
    for figures in shared.figures:
        assert figures["plain losses"] == pytest.approx([here, weighted, there, back], rel=1e-6)
        assert figures["plain losses"][0] == figures["plain losses"][3]


def test_differences_of_gradients(shared, alone):
    """Their own error in fp32 is about 2e-4; the parameters are what they were, to the bit."""
    values, expected = shared.figures[0], alone.figures[0]
    assert values["differences"] == pytest.approx(expected["differences"], rel=5e-4)
    norm = float(vector(alone, alone, "fp32").norm())
    assert values["differences"][1] == pytest.approx(norm, rel=5e-4)
    dots = values["dots of differences"]
    assert sum(dots.values()) == pytest.approx(quadratic_of(expected["fp32"]), rel=5e-4)
    weights = tiny_model(torch.float32, **on_ranks.ORDINARY).state_dict()
    for name, part in shared.vectors["put back"].items():
        assert torch.equal(part, weights[name]), name


def test_streaming_keeps_one_gradient_at_a_time(shared):
    """All `.grad` whenever the backward pass adds to it: the largest tensor's at most."""
    hessian = DualHessian(CurvedModel(tiny_model(**on_ranks.UNEVEN), ranks=ALONE))
    sizes = [weight.shape for weight in hessian.parameters.weights.values()]
    for processes, alive in [
        (1, on_ranks.gradients_alive(hessian, random_tokens(3))),
        *((len(shared.figures), figures["alive"]) for figures in shared.figures),
    ]:
        assert len(alive) == len(sizes) + 1
        assert alive[-1] == 0
        assert max(alive) <= max(
            8 * -(-shape[0] // processes) * (shape.numel() // shape[0]) for shape in sizes
        )


def test_streaming_takes_less_memory_than_the_gradient():
    """Hv kept whole takes the model's size once more, its products with v a few tensors'.

    21 million parameters in 56 matrices and two tokens: beside the gradients activations are
    nothing.
    """
    wide: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    hessian = DualHessian(CurvedModel(tiny_model(torch.float32, std=0.02, **wide), ranks=ALONE))
    tokens_BS1, probe = random_tokens(1, length=2), Probe(0, 0)
    v_p, model = hessian.parameters.probe(probe), 4 * hessian.parameters.size
    assert most_allocated(lambda: hessian.product(tokens_BS1, v_p)) > model
    for product in (
        lambda: hessian.probed(tokens_BS1, probe),
        lambda: hessian.quadratic(tokens_BS1, v_p),
    ):
        assert most_allocated(product) + most_of_python(product) < 0.2 * model


def test_a_rank_holds_its_part_of_the_model_only(shared, alone):
    """All tensors that Python knows: parameters and tangents, in padded rows or whole."""
    whole = alone.figures[0]["memory"]
    assert whole["alive"] >= 2 * whole["weights"] == 2 * whole["whole"]
    processes = len(shared.figures)
    shapes = [weight.shape for weight in tiny_model(**on_ranks.ORDINARY).parameters()]
    padded = sum(4 * -(-shape[0] // processes) * (shape.numel() // shape[0]) for shape in shapes)
    memories = [figures["memory"] for figures in shared.figures]
    assert sum(memory["weights"] for memory in memories) == whole["whole"]
    for memory in memories:
        assert memory["weights"] <= padded < 1.03 * whole["whole"] / processes
        assert memory["alive"] <= 2 * padded + 1024


def test_the_guard_refuses_on_every_rank_what_is_wrong_on_one(shared):
    for figures in shared.figures:
        assert figures["guarded"]["passed"]["product_relative_difference"] < 1e-3
        assert "refusing to measure: Hv in fp32 is off" in figures["guarded"]["refused"]


def test_a_weight_that_is_not_a_number_ends_every_rank(shared):
    for figures in shared.figures:
        assert len(figures["poisoned"]) == 2
        assert all("is nan; check the checkpoint" in line for line in figures["poisoned"])


def test_ranks_that_hold_whole_models_do_not_wait_for_each_other(shared):
    """Rank r makes r products of its own; with a collective among them none would end."""
    hessian = DualHessian(CurvedModel(tiny_model(), ranks=ALONE))
    expected: list[float] = []
    for rank, figures in enumerate(shared.figures):
        assert figures["replicated"] == pytest.approx(expected, rel=1e-12)
        quadratic = hessian.quadratic(
            random_tokens(seed=rank), hessian.parameters.probe(Probe(0, rank))
        )
        expected += [quadratic.loss, quadratic.slope, sum(quadratic.dots.values())]


def test_one_process_holds_everything_with_either_sharding(alone):
    """Without torchrun there is nobody to share with."""
    curved = CurvedModel(tiny_model(**on_ranks.UNEVEN), ranks=ALONE, sharding="fsdp")
    quadratic = DualHessian(curved).probed(random_tokens(3), Probe(0, 1))
    expected = alone.figures[0]["tied=False checkpointing=False batch=3"]
    assert [quadratic.loss, quadratic.slope] == expected["of the form"]
    assert quadratic.dots == expected["dots"]
