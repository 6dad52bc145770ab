"""The check of what a library left: grids written out, and every fault of a result refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from base.errors import UserError
from quant_eval.libraries.outcome import ReportedGrid, check_outcome, original_weights
from quant_eval.quantizers.libraries import LibrarySpec
from tests.quant_eval.models import make_model
from tests.quant_eval.specs import typed

# 3 bits: two groups of two weights, 0.5 x -4..3
BEFORE = {"q.weight": torch.tensor([[-2.1, 1.2, 0.3, 0.2]]), "norm.weight": torch.ones(2)}
AFTER = BEFORE | {"q.weight": torch.tensor([[-2.0, 1.0, 0.5, 0.0]])}
GRID = ReportedGrid(torch.full((1, 2), 0.5), torch.full((1, 2), 4))
GROUPS = r"for q \[1, 4\] instead of groups of 2 inputs; use our own gptq"


def check(after=AFTER, grid=GRID, linears=("q",), spec="autoround-b3-g2", moves_errors=False):
    grids, asked = {"q": grid} if grid else {}, typed(LibrarySpec, spec)
    before = iter(BEFORE.items())
    return check_outcome("lib", after, before, grids, linears, asked, moves_errors=moves_errors)


def weights(*values):
    return {"after": AFTER | {"q.weight": torch.tensor([values])}}


def grid(scales_OG=GRID.scales_OG, zeros_OG=GRID.zeros_OG, groups_I=None):
    return {"grid": ReportedGrid(scales_OG, zeros_OG, groups_I)}


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ({"grid": None}, "lib left out q;"),
        ({"linears": ("q", "k")}, "lib left out k;"),
        ({"linears": ()}, "lib made a grid of q, which is not a linear of a block; report it"),
        (grid(torch.full((1, 1), 0.5), torch.full((1, 1), 4)), GROUPS),
        (grid(torch.full((1, 8), 0.5), torch.full((1, 8), 4)), GROUPS),  # more than inputs
        (grid(torch.full((1, 0), 0.5), torch.full((1, 0), 4)), GROUPS),
        (grid(torch.full((2, 2), 0.5)), GROUPS),
        (grid(zeros_OG=torch.full((1, 1), 4)), GROUPS),
        (grid(groups_I=torch.tensor([0, 0, 0, 1])), GROUPS),
        (grid(groups_I=torch.tensor([0, 0, 2, 2])), GROUPS),
        (grid(zeros_OG=torch.full((1, 2), 3)), "an asymmetric grid inst"),
        (grid(torch.full((1, 2), torch.nan)), "left q off its gr"),
        (weights(-2.0, 1.0, 0.6, 0.0), "left q off its grid"),
        (weights(-2.0, 2.0, 0.5, 0.0), "left q off its grid"),  # one above the highest code
        (weights(-2.5, 1.0, 0.5, 0.0), "left q off its grid"),
        (weights(1.0, 1.0, 0.5, 0.0), "left q off its grid"),  # six steps from where it was
        (weights(-2.1, 1.2, 0.3, 0.2), "left q off its grid"),  # as it was
        (weights(torch.nan, 1.0, 0.5, 0.0), "made q not finite"),
        ({"after": AFTER | {"norm.weight": torch.tensor([1.0, 1.0000001])}}, "changed norm.weight"),
        ({"after": AFTER | {"norm.weight": torch.ones(2).bfloat16()}}, "dtype or shape of norm"),
        ({"after": AFTER | {"q.weight": torch.zeros(1, 2)}}, "dtype or shape of q.weight"),
        ({"after": {"q.weight": AFTER["q.weight"]}}, "dtype or shape of norm.weight"),
        ({"after": AFTER | {"q.bias": torch.zeros(1)}}, "lib added q.bias"),
    ],
)
def test_a_fault_is_refused(fault, line):
    with pytest.raises(UserError, match=line):
        check(**fault)


def test_a_method_that_moves_errors_may_move_a_weight_by_any_number_of_steps():
    assert check().keys() == {"q.weight"}
    assert check(**weights(1.0, 1.0, 0.5, 0.0), moves_errors=True)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ordered", [False, True])
def test_all_codes_of_any_grid_are_points_and_the_next_numbers_are_not(bits, dtype, ordered):
    """Scales of both signs, groups in any order; in bf16 255 steps are wider than the rounding."""
    generator = torch.Generator().manual_seed(bits)
    scales_OG = (torch.rand(64, 4, generator=generator) + 0.01).to(dtype).float()
    scales_OG[::2] *= -1
    zeros_OG = torch.randint(2**bits, (64, 4), generator=generator)
    groups_I = torch.arange(64) // 16
    if ordered:
        groups_I = groups_I[torch.randperm(64, generator=generator)]
    codes_OI = torch.randint(2**bits, (64, 64), generator=generator)
    weight_OI = ((codes_OI - zeros_OG[:, groups_I]) * scales_OG[:, groups_I]).to(dtype)
    grid = ReportedGrid(scales_OG, zeros_OG, groups_I if ordered else None)

    def outcome(value_OI):
        before = iter({"q.weight": torch.zeros(64, 64, dtype=dtype)}.items())
        spec = typed(LibrarySpec, f"autoround-b{bits}-g16-asym")
        return check_outcome(
            "lib", {"q.weight": value_OI}, before, {"q": grid}, ["q"], spec, moves_errors=True
        )

    assert torch.equal(outcome(weight_OI)["q.weight"], weight_OI)
    if bits < 8:  # where every step is wider than the spacing of bf16
        moved_OI = weight_OI.clone()
        moved_OI[5, 7] = weight_OI[5, 7] * (1 + 2 * torch.finfo(dtype).eps) + scales_OG[5, 0] / 8
        with pytest.raises(UserError, match="off its grid"):
            outcome(moved_OI)


@pytest.mark.parametrize("name", ["olmo2", "llama-tied", "gpt_neox"])
def test_the_original_is_what_transformers_loads(tmp_path, name):
    directory = make_model(tmp_path / "model", name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    expected = dict(model.named_parameters())
    original = dict(original_weights(directory, model, torch.bfloat16))
    assert original.keys() == expected.keys()
    assert all(torch.equal(original[key], value) for key, value in expected.items())
