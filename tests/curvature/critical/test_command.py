"""The command: against exact Hessian products, a dense scan of weights put together by hand, ranks.

Shapes: B sequences, S positions, C multiples, P parameters.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from base.ranks import ALONE
from ckpt_tools.hf.configuration import read_config
from curvature.critical.directions import MovedModel, move_from
from curvature.critical.measurement import SharedLosses
from tests.conftest import make_hf_directory
from tests.curvature.conftest import command, dual_hessian
from tests.runs import ranks, succeed
from train.data.batches import batch
from train.data.corpus import open_corpus

SEQUENCES, LENGTH = 6, 24
SMALL = ["--sequences", SEQUENCES, "--sequence-length", LENGTH, "--batch-size", 4]


def tokens(prefix: Path) -> Tensor:
    """The sequences that the command reads, [B, S + 1]."""
    drawn = batch(open_corpus(prefix), step=1, batch_size=SEQUENCES, sequence_length=LENGTH, seed=0)
    return torch.from_numpy(drawn)


def loaded(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def descended(tmp_path_factory, held_out_prefix) -> tuple[Path, Path]:
    """A checkpoint, and the one before it, from which a step down the gradient has led to it.

    The step was half of what the loss allows: going on lowers it at first.
    """
    root = tmp_path_factory.mktemp("descended")
    before = make_hf_directory(root / "before")
    model = loaded(before)
    tokens_BS1 = tokens(held_out_prefix)
    logits_BSV = model(tokens_BS1[:, :-1]).logits
    labels = tokens_BS1[:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=0.3)
    model.save_pretrained(root / "model")
    return root / "model", before


@pytest.fixture(scope="module")
def measured(tmp_path_factory, descended, held_out_prefix) -> dict[str, Any]:
    model, before = descended
    out = tmp_path_factory.mktemp("measured") / "out"
    options = ["--previous", before, "--data", held_out_prefix, *SMALL, "--out", out]
    assert command("critical", model, *options) == 0
    return json.loads((out / "result.json").read_text())["measured"]


def scanned(descended, prefix, multiples_C) -> list[float]:
    """Mean losses of models whose weights were put together in float64, one by one."""
    theta, before = (load_file(path / "model.safetensors") for path in descended)
    model, tokens_BS1 = loaded(descended[0]), tokens(prefix)
    losses = []
    for multiple in multiples_C:
        moved = {
            name: (theta[name].double() * (1 + multiple) - multiple * before[name].double()).float()
            for name in theta
        }
        model.load_state_dict(moved)
        with torch.no_grad():
            logits_BSV = model(tokens_BS1[:, :-1]).logits.double()
        nats = torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten()
        )
        losses.append(float(nats))
    return losses


def test_no_smaller_multiple_of_a_dense_scan_raises_the_loss(descended, measured, held_out_prefix):
    move = measured["directions"]["move"]
    found = move["critical"]
    assert found["outcome"] == "crossing"
    end = 1.5 * found["above"]
    multiples = [end * number / 120 for number in range(121)]
    base, *losses = scanned(descended, held_out_prefix, multiples)
    first = next(c for c, loss in zip(multiples[1:], losses, strict=True) if loss > base)
    # the scan's own step, and the bend of the line between the ends of the bracket
    assert found["multiple"]["mean"] == pytest.approx(first - end / 240, abs=end / 120)
    assert found["not_above"] <= first <= found["above"] + end / 120
    assert measured["loss"]["mean"] == pytest.approx(base, rel=1e-6)
    assert measured["forward_passes"] == 2 + move["forward_passes"] < 2 + 10


def exact(hf_dir: Path, direction: dict[str, Tensor], tokens_BS1: Tensor) -> tuple[float, float]:
    """g.d and d'Hd by an exact product."""
    hessian = dual_hessian(loaded(hf_dir))
    quadratic = hessian.quadratic(tokens_BS1, hessian.parameters.take(direction))
    return quadratic.slope, math.fsum(quadratic.dots.values())


def test_slope_and_curvature_are_those_of_an_exact_product(family, held_out_prefix, tmp_path):
    given = ["--previous", family.previous, "--quantized", family.quantized]
    options = [*given, "--data", held_out_prefix, *SMALL, "--out", tmp_path / "out"]
    # A rise of so little that the fourth order is no part of it, and far above fp32's rounding.
    assert command("critical", family.base, *options, "--rise", "3e-5") == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    lines = result["measured"]["directions"]
    base, before = (
        load_file(path / "model.safetensors") for path in (family.base, family.previous)
    )
    dense = dict(base)
    for path in family.quantized.rglob("*.safetensors"):
        dense |= load_file(path)
    directions = {
        "move": {name: base[name] - before[name] for name in base},
        "step-rtn-b3-g16": {name: dense[name].float() - base[name] for name in base},
    }
    assert lines.keys() == directions.keys()
    for name, direction in directions.items():
        slope, second = exact(family.base, direction, tokens(held_out_prefix))
        line = lines[name]
        norm = math.sqrt(sum(float(part.double().square().sum()) for part in direction.values()))
        assert line["norm"] == pytest.approx(norm, rel=1e-9)
        # 1%: what fp32 leaves of a second difference of 6e-5 nats, and the next order
        assert line["second_derivative"]["mean"] == pytest.approx(second, rel=1e-2)
        assert line["curvature"]["mean"] == pytest.approx(second / norm**2, rel=1e-2)
        scale = math.sqrt(abs(second) * 3e-5)
        assert line["slope"]["mean"] == pytest.approx(slope, abs=1e-2 * max(scale, abs(slope)))


def test_two_ranks_give_the_bits_of_one(descended, measured, held_out_prefix, tmp_path):
    model, before = descended
    program = ["curvature", "critical", model, "--previous", before, "--data", held_out_prefix]
    done = succeed(ranks(2, *map(str, [*program, *SMALL, "--out", tmp_path / "out"])))
    assert done.stdout.count("critical sharpness") == 1
    shared = json.loads((tmp_path / "out" / "result.json").read_text())["measured"]
    assert shared == measured


def test_points_are_rounded_once_and_leave_nothing(family):
    config = read_config(family.base)
    direction = move_from(family.previous, family.base)
    theta, before = (
        load_file(path / "model.safetensors") for path in (family.base, family.previous)
    )
    for dtype in (torch.float32, torch.bfloat16):
        moved = MovedModel(family.base, config, dtype, torch.device("cpu"))
        moved.move(direction, 1000.0)
        moved.disturb(seed=0)
        moved.move(direction, 0.75)
        for name, weight in moved.model.named_parameters():
            ends = theta[name].double(), before[name].double()
            expected = ends[0] + 0.75 * (ends[0] - ends[1])
            # half a digit of the precision, and rounding in fp32 before it
            digit = torch.finfo(dtype).eps / 2 + torch.finfo(torch.float32).eps
            scale = expected.abs() + (ends[0] - ends[1]).abs()
            assert bool(torch.all((weight - expected).abs() <= digit * scale))
        moved.move()
        assert all(
            torch.equal(weight, theta[name].to(dtype))
            for name, weight in moved.model.named_parameters()
        )


def test_disturbed_weights_are_neighbours(family):
    for dtype in (torch.float32, torch.bfloat16):
        moved = MovedModel(family.base, read_config(family.base), dtype, torch.device("cpu"))
        moved.move()
        before = {name: weight.clone() for name, weight in moved.model.named_parameters()}
        moved.disturb(seed=0)
        steps = []
        for name, weight in moved.model.named_parameters():
            for end in (torch.inf, -torch.inf):
                ends = torch.full_like(weight, end)
                steps.append((weight == torch.nextafter(before[name], ends)).flatten())
            stays = (weight == before[name]).flatten()
            assert torch.all(steps[-1] | steps[-2] | stays)
        share = torch.cat(steps).double().mean()  # of each of two ways
        assert float(share) == pytest.approx(0.25, abs=0.02)


def test_bf16_says_how_little_it_resolves(descended, measured, held_out_prefix, tmp_path):
    model, before = descended
    options = ["--previous", before, "--data", held_out_prefix, *SMALL, "--dtype", "bf16"]
    assert command("critical", model, *options, "--out", tmp_path / "out") == 0
    rough = json.loads((tmp_path / "out" / "result.json").read_text())["measured"]
    assert measured["noise"] < 1e-6 < rough["noise"]
    line = rough["directions"]["move"]
    # A curvature is there exactly where its rise is ten times the noise.
    assert (line["curvature"] is not None) == (abs(line["rise"]) > 10 * rough["noise"])


def test_nothing_is_kept_for_a_backward_pass(family, held_out_prefix):
    moved = MovedModel(family.base, read_config(family.base), torch.float32, torch.device("cpu"))
    losses = SharedLosses(moved.model, tokens(held_out_prefix), 4, ALONE)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed):
        moved.move(move_from(family.previous, family.base), 0.5)
        losses("a point")
        assert not saved
        # the hooks see what a forward pass with gradients saves
        moved.model.requires_grad_(True)
        moved.model(tokens(held_out_prefix)[:, :-1])
    assert saved


def test_what_is_refused(family, held_out_prefix, tmp_path, capsys):
    data = ["--data", held_out_prefix, *SMALL]

    def refusal(*arguments) -> str:
        assert command("critical", *arguments, *data) == 2
        return capsys.readouterr().err

    assert "give --previous, --quantized or both" in refusal(family.base)
    several = [family.base, family.previous, "--previous", family.previous]
    assert "1 --previous for 2 HF directories" in refusal(*several)
    quantized = ["--quantized", family.quantized]
    assert "give a single HF_DIR" in refusal(family.base, family.previous, *quantized)
    assert "two results of --quantized are step-rtn-b3-g16" in refusal(
        family.base, *quantized, *quantized
    )
    assert "the length of move is 0" in refusal(family.base, "--previous", family.base)
    wider = make_hf_directory(tmp_path / "wider", hidden_size=64)
    assert "has other parameters than" in refusal(family.base, "--previous", wider)
