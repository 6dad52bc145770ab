"""The figure of blocks: shares worked out by hand, and what may not be shared."""

import json

import pytest

from base.errors import UserError
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from dynamics.figures.blocks import (
    ALONE,
    NEEDED,
    TITLES,
    blocks,
    blocks_of,
    output_errors,
    shares,
)
from study.figures.canvas import Canvas
from study.figures.looks import Runs, looks_for
from tests.quant_eval.models import run_settings
from tests.sealing import reseal
from tests.study.synthetic import write_blocks

RESULT = "hf/step00000640/blocks/gptq-b3-g32/result.json"


def result_with(increase: tuple[float, float, float], alone: list, others: list) -> Quantization:
    """increase, and per block alone and without it: (value, low, high)."""

    def cost(value: float, low: float, high: float) -> dict:
        return {
            "absolute_error": value,
            "intervals": {"absolute_error": (low, high), "kl_divergence": (0, 1)},
        }

    pairs = enumerate(zip(alone, others, strict=True))
    listed = [
        {"block": block, "alone": cost(*own), "all_but_it": cost(*rest)}
        for block, (own, rest) in pairs
    ]
    names = (
        "gpt_neox.layers.1.attention.dense",
        "gpt_neox.layers.0.mlp.up",
        "gpt_neox.layers.0.mlp.down",
    )
    layers = [
        {"name": name, "relative_output_error": error}
        for name, error in zip(names, (0.3, None, 0.1), strict=True)
    ]
    measured = cost(*increase) | {"blocks": listed, "layers": layers}
    return Quantization.model_validate(measured)


def test_shares_are_of_the_whole_models_increase():
    alone, others = (
        [(0.1, 0.08, 0.13), (0.05, -0.01, 0.11)],
        [(0.06, 0.05, 0.08), (0.12, 0.1, 0.15)],
    )
    parts = shares(result_with((0.2, 0.15, 0.25), alone, others))
    assert parts[ALONE] == {
        0: pytest.approx((0.5, 0.4, 0.65)),
        1: pytest.approx((0.25, -0.05, 0.55)),
    }
    # without block 0 there is 0.06 of 0.2 left: it makes 70 percent
    assert parts[NEEDED] == {
        0: pytest.approx((0.7, 0.6, 0.75)),
        1: pytest.approx((0.4, 0.25, 0.5)),
    }


@pytest.mark.parametrize("low", [0.0, -0.1])
def test_an_increase_that_may_be_none_is_not_shared_out(low):
    assert shares(result_with((0.2, low, 0.5), [(0.1, 0, 0.2)], [(0.1, 0, 0.2)])) == {}


def test_linears_belong_to_the_block_of_their_name_and_folded_ones_to_none():
    increase = (0.1, 0.0, 0.2)
    assert output_errors(
        result_with((0.2, 0.1, 0.3), [increase, increase], [increase, increase])
    ) == {
        0: [0.1],
        1: [0.3],
    }


@pytest.mark.parametrize("count", [4, 32])
def test_the_figure_holds_every_share_of_every_run(study_dir, study, count):
    """With many blocks intervals are bands."""
    for run in study.runs:
        path = study_dir / run.name / RESULT
        write_blocks(path, json.loads(path.read_text()), blocks=count)
    drawing = blocks.draw(Canvas(study, [], study_dir))
    assert drawing is not None
    assert isinstance(drawing.chart, dict)
    cost = [2 if block in (0, count - 1) else 1 for block in range(count)]  # as the synthetic ones
    expected = [
        [0.9 * part / sum(cost) for part in cost],
        [1.2 * part / sum(cost) for part in cost],
    ]
    expected.append([0.03 * (1 + 0.1 * block) for block in range(count)])
    for panel, quantity, values in zip(drawing.chart["concat"], TITLES, expected, strict=True):
        assert panel["title"] == ["GPTQ, 3 bits, groups of 32", TITLES[quantity]]
        marks = panel["layer"][-1]
        kinds = {layer["mark"]["type"] for layer in marks["layer"]}
        assert kinds == {"line", "point", "area" if count > 12 else "rule"}
        by_run: dict[str, list] = {}
        for row in marks["data"]["values"]:
            by_run.setdefault(row["run"], []).append((row["decoder block"], row[quantity.label]))
        assert len(by_run) == len(study.runs)
        for shown in by_run.values():
            assert [block for block, _ in shown] == list(range(count))
            assert [value for _, value in shown] == pytest.approx(values)


def test_a_result_without_a_clear_increase_has_no_shares(study_dir, study):
    for run in study.runs:
        path = study_dir / run.name / RESULT
        content = json.loads(path.read_text())
        content["measured"]["intervals"]["absolute_error"][0] = -0.001
        reseal(path, content)
    drawing = blocks.draw(Canvas(study, [], study_dir))
    assert drawing is not None
    assert isinstance(drawing.chart, dict)
    texts = [panel["layer"][-1].get("mark", {}).get("text") for panel in drawing.chart["concat"]]
    assert texts == ["no clear increase", "no clear increase", None]
    assert {row["panel"] for row in drawing.rows} == {
        "GPTQ, 3 bits, groups of 32, linears of the block"
    }


def test_what_has_no_blocks_is_left_out_and_what_is_broken_is_refused(study_dir, study):
    for run in study.runs[1:]:
        (study_dir / run.name / RESULT).unlink()
    path = study_dir / study.runs[0].name / RESULT
    content = json.loads(path.read_text())
    content["measured"]["blocks"] = []
    reseal(path, content)
    assert blocks.draw(Canvas(study, [], study_dir)) is None
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        blocks.draw(Canvas(study, [], study_dir))


def test_a_real_result_is_drawn_and_equals_the_one_without_blocks(
    hf_dir, train_prefix, held_out_prefix, tmp_path
):
    """quant_eval's own result: of the spec itself --per-block changes nothing."""
    from base.ranks import start
    from quant_eval.measuring.measurement import measure
    from quant_eval.specs import parse_spec

    text = {"calibration_sequences": 16, "sequence_length": 32, "eval_tokens": 5000}
    settings = run_settings(train_prefix, held_out_prefix, **text)
    (plain,), (by_block,) = (
        measure(
            hf_dir,
            (parse_spec("gptq-b2-g16"),),
            (tmp_path,),
            settings.model_copy(update={"per_block": per_block}),
            start("cpu"),
        )
        for per_block in (False, True)
    )
    reseal(tmp_path / "result.json", by_block)
    measured = json.loads((tmp_path / "result.json").read_text())["measured"]
    for result in (measured, plain["measured"]):
        result.pop("blocks", None), result.pop("units")
    assert measured == plain["measured"]
    read = read_result(tmp_path, Quantization).measured
    (look,) = looks_for(["one"])
    drawing = blocks_of(Runs("model", {"one": look}), [(look, read)], "GPTQ")
    assert [row["decoder block"] for row in drawing.rows] == [0, 1], (
        "2 bits of nothing have no share"
    )
