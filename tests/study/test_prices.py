"""Prices of studies: every kind has one, chains by brute force, one screen."""

import math
import re
from itertools import pairwise

import pytest

from quant_eval.cost import Shape, forward_seconds, quantizing_seconds
from quant_eval.specs import parse_spec
from study.definition import KINDS
from study.machine.hardware import Hardware, planned
from study.machine.needs import Needs, model_config
from study.machine.prices import HOUR, PRICES, PricedModel, Prices
from study.recipes.resolve import recipe_names, resolve, whole_recipes
from study.recipes.shown import heading, summary
from study.steps import steps_of
from tests.study.commands import printed
from train.planning.flops import GPUS

SCREEN = 24  # lines


def prices_of(name, profile="full", gpus=0):
    chosen = resolve(name, profile)
    hardware = planned(gpus, "h100", gpus) if gpus else Hardware(1)
    return Prices(Needs(chosen, hardware), steps_of(chosen), "h100")


def test_every_kind_of_measurement_has_a_price():
    assert set(PRICES) == {kind.name for kind, _ in KINDS}


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "trajectory"])
def test_the_hours_of_a_recipe_are_those_of_its_steps(name):
    prices = prices_of(name, "smoke")
    of_kinds = [price.hours for price in prices.by_kind()]
    assert all(0 <= hours.least <= hours.expected <= hours.most for hours in of_kinds)
    total = math.fsum(hours.expected for hours in of_kinds)
    assert total == pytest.approx(math.fsum(prices.hours.values()))
    assert total > 0


def test_a_quantization_is_priced_by_hand():
    """Three draws of GPTQ and of its losses, one where no text is read; those of the full model."""
    prices = prices_of("olmo2-7b-lr")
    of_spec = {step.specs[-1]: step for step in prices.steps if step.kind == "quantize"}
    config = model_config(prices.needs.config(of_spec["gptq-b4-g128"]))
    shape, gpu = Shape.of(config), GPUS["h100"]
    evaluation = forward_seconds(shape, 600_000, 2048, gpu, "bf16")
    quantizing = quantizing_seconds(shape, parse_spec("gptq-b4-g128"), 256, 2048, gpu, "bf16")
    expected = {
        "gptq-b4-g128": 3 * (quantizing + evaluation) + evaluation,
        "w4a4-g128-quarot": 2 * evaluation,
    }
    # the process has started for the first spec of a model, which is none of them
    for spec, seconds in expected.items():
        assert prices.hours[of_spec[spec].name] * HOUR == pytest.approx(seconds)


def test_losses_along_moves_are_priced_at_the_whole_context():
    """`curvature critical` and `slice` take it, unlike quantization, where no length is given."""
    prices = prices_of("olmo2-7b-lr")
    assert prices.needs.study.critical
    assert prices.needs.study.critical.sequence_length is None
    step = next(step for step in prices.steps if step.kind == "critical")
    measured = PricedModel(prices.needs.study, prices.needs.config(step), "h100")
    assert measured.length(prices.needs.study.critical) == 4096
    assert measured.length(prices.needs.study.slice) == 4096
    assert measured.length(prices.needs.study.quantization) == 2048


def test_the_longest_chain_against_all_chains():
    prices = prices_of("tiny", "smoke", gpus=2)
    by_name = {step.name: step for step in prices.steps}

    def hours(step):
        return prices.hours[step.name] / max(1, prices.gpus(step))

    def longest(step):
        before = [by_name[name] for name in step.after if name in by_name]
        return hours(step) + max(map(longest, before), default=0.0)

    total, chain = prices.longest_chain()
    assert total == pytest.approx(max(map(longest, prices.steps)))
    assert total == pytest.approx(math.fsum(map(hours, chain)))
    assert all(earlier.name in later.after for earlier, later in pairwise(chain))


def test_the_largest_study_is_shown_on_one_screen():
    shown = printed("show", "olmo2-7b-lr", "--gpus", "64")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("takes ") for line in lines[1:3])
    assert "longest chain" in shown
    assert "python -m" not in shown.replace("python -m slurm", "")

    everything = printed("show", "olmo2-7b-lr", "--gpus", "64", "--all")
    steps = steps_of(resolve("olmo2-7b-lr"))
    named = {line.partition(": ")[0] for line in everything.splitlines()}
    assert {step.name for step in steps} <= named
    assert "kv4-quarot" in everything
    assert "sources: the ablation: arXiv 2501.00656" in everything
    for kind in ("train", "quantize", "methods", "curvature", "tasks", "in all"):
        assert re.search(rf"^{kind} ", everything, re.MULTILINE)


def test_every_recipe_is_shown_on_one_screen():
    """Beside its runs there are a line of hours, two of disk, a blank one and one on --all."""
    for name in whole_recipes():
        study = resolve(name)
        lines = [*heading(study), *summary(study)]
        assert len(lines) <= SCREEN - 5, name
        assert max(map(len, lines)) <= 100, name
    lines = printed("show", "tiny").splitlines()
    assert re.match(r"takes \S+ minutes of two cores \(estimate: ", lines[1])
    assert len(lines) <= SCREEN


def test_a_study_for_the_cpu_is_priced_in_core_hours():
    assert "core-hours" in printed("show", "tiny", "--all")
    assert "H200-hours" in printed("show", "tiny", "--gpu", "h200")
