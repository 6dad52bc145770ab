"""The figure of blocks: shares worked out by hand, and what may not be shared."""

import json

import pytest
from PIL import Image

from quant_eval.settings import CalibrationSettings, ComputeSettings, EvaluationSettings
from study import blocks
from study.blocks import BlockResult, draw_results, output_errors, read_block_result, shares
from study.canvas import looks_for
from study.collect import read_measured
from tests.study.synthetic import write_blocks
from train.command import UserError
from train.run_directory import write_json

RESULT = "hf/step00000640/blocks/gptq-b3-g32/result.json"


def result_with(increase: tuple[float, float, float], alone: list, others: list) -> BlockResult:
    """increase, and per block alone and without it: (value, low, high)."""

    def cost(value: float, low: float, high: float) -> dict:
        return {"absolute_error": value, "intervals": {"absolute_error": (low, high), "kl_divergence": (0, 1)}}

    pairs = enumerate(zip(alone, others, strict=True))
    listed = [{"block": block, "alone": cost(*one), "all_but_it": cost(*rest)} for block, (one, rest) in pairs]
    names = ("gpt_neox.layers.1.attention.dense", "gpt_neox.layers.0.mlp.up", "gpt_neox.layers.0.mlp.down")
    layers = [
        {"name": name, "relative_output_error": error} for name, error in zip(names, (0.3, None, 0.1), strict=True)
    ]
    model = {"path": "/models/lr3e-3/hf/step00000640"}
    measured = cost(*increase) | {"blocks": listed, "layers": layers}
    return BlockResult.model_validate({"model": model, "spec": {"name": "rtn-b3-g32"}, "measured": measured})


def test_shares_are_of_the_whole_models_increase():
    alone, others = [(0.1, 0.08, 0.13), (0.05, -0.01, 0.11)], [(0.06, 0.05, 0.08), (0.12, 0.1, 0.15)]
    found = shares(result_with((0.2, 0.15, 0.25), alone, others).measured)
    assert found is not None
    assert [list(share) for share in found[0]] == [
        pytest.approx([0.5, 0.4, 0.65]),
        pytest.approx([0.25, -0.05, 0.55]),
    ]
    # without block 0 there is 0.06 of 0.2 left: it is behind 70 percent
    assert [list(share) for share in found[1]] == [
        pytest.approx([0.7, 0.6, 0.75]),
        pytest.approx([0.4, 0.25, 0.5]),
    ]


@pytest.mark.parametrize("low", [0.0, -0.1])
def test_an_increase_that_may_be_none_is_not_shared_out(low):
    assert shares(result_with((0.2, low, 0.5), [(0.1, 0, 0.2)], [(0.1, 0, 0.2)]).measured) is None


def test_linears_belong_to_the_block_of_their_name_and_folded_ones_to_none():
    one = (0.1, 0.0, 0.2)
    assert output_errors(result_with((0.2, 0.1, 0.3), [one, one], [one, one]).measured) == {0: [0.1], 1: [0.3]}


@pytest.mark.parametrize("count", [4, 32])
def test_the_figure_holds_every_share_in_the_look_of_its_result(study_dir, tmp_path, monkeypatch, count):
    paths, drawn = [study_dir / run / RESULT for run in ("lr1e-3", "lr3e-2")], []
    for path in paths:
        write_blocks(path, json.loads(path.read_text()), blocks=count)
    monkeypatch.setattr(blocks, "save", lambda figure, path: drawn.append(figure))
    draw_results(paths, tmp_path / "blocks.png")
    (figure,) = drawn
    text = [entry.get_text() for entry in figure.legends[0].get_texts()]
    assert text == ["model", "lr1e-3/step00000640", "lr3e-2/step00000640", "equal shares"]
    assert "GPTQ, 3 bits, groups of 32" in figure.axes[0].get_title()
    looks = looks_for(text[1:3])
    cost = [2 if block in (0, count - 1) else 1 for block in range(count)]  # as the synthetic blocks cost
    expected = [[0.9 * one / sum(cost) for one in cost], [1.2 * one / sum(cost) for one in cost]]
    expected.append([0.03 * (1 + 0.1 * block) for block in range(count)])
    for axis, values in zip(figure.axes, expected, strict=True):
        lines = {
            (line.get_color(), line.get_marker()): line for line in axis.get_lines() if len(line.get_xdata()) == count
        }
        for look in looks:
            line = lines[look.colour, look.marker]
            assert list(line.get_ydata()) == pytest.approx(values)
            assert [round(place) for place in line.get_xdata()] == list(range(count))


def test_a_result_without_a_clear_increase_says_so(study_dir, tmp_path, monkeypatch):
    path, drawn = study_dir / "lr1e-3" / RESULT, []
    content = json.loads(path.read_text())
    content["measured"]["intervals"]["absolute_error"][0] = -0.001
    path.write_text(json.dumps(content))
    monkeypatch.setattr(blocks, "save", lambda figure, path: drawn.append(figure))
    draw_results([path], tmp_path / "blocks.png")
    assert "lr1e-3/step00000640 (no clear increase)" in [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert not drawn[0].axes[0].containers
    assert "no loss increase told from 0" in [text.get_text() for text in drawn[0].axes[0].texts]
    assert drawn[0].axes[2].containers


def test_labels_name_the_spec_where_it_differs(study_dir, tmp_path, monkeypatch):
    first = study_dir / "lr1e-3" / RESULT
    second, drawn = tmp_path / "other" / "result.json", []
    content = json.loads(first.read_text())
    content["spec"]["name"] = "rtn-b3-g32"
    second.parent.mkdir()
    write_json(second, content)
    monkeypatch.setattr(blocks, "save", lambda figure, path: drawn.append(figure))
    draw_results([first.parent, second], tmp_path / "blocks.png")
    text = [entry.get_text() for entry in drawn[0].legends[0].get_texts()]
    assert text[1:3] == ["lr1e-3/step00000640 gptq-b3-g32", "lr1e-3/step00000640 rtn-b3-g32"]


def test_what_has_no_blocks_is_refused(study_dir, tmp_path):
    with pytest.raises(UserError, match=r"measure again with 'python -m quant_eval run \.\.\. --per-block'"):
        read_block_result(study_dir / "lr1e-3/hf/step00000640/quant/gptq-b3-g32")
    for content in ("{", "[1]", '{"measured": 3}', '{"measured": {"blocks": []}}'):
        (tmp_path / "result.json").write_text(content)
        with pytest.raises(UserError, match="no result of a quantization"):
            read_block_result(tmp_path)
    with pytest.raises(UserError, match="is a directory"):
        draw_results([study_dir / "lr1e-3" / RESULT], tmp_path)


def test_a_real_result_is_drawn_and_equals_the_one_without_blocks(hf_dir, train_prefix, held_out_prefix, tmp_path):
    """quant_eval's own result: of the spec itself --per-block changes nothing."""
    from ckpt_tools.ranks import start
    from quant_eval.measurement import measure
    from quant_eval.specs import parse_spec

    calibration = CalibrationSettings(prefix=train_prefix, sequences=16, sequence_length=32, seed=0)
    evaluation = EvaluationSettings(
        prefix=held_out_prefix, max_tokens=2000, sequence_length=32, documents="separate",
        bootstrap_samples=1000, level=0.95, seed=0,
    )  # fmt: skip
    compute = ComputeSettings(dtype="fp32", batch_size=8, device="cpu", scratch=None)
    common = (hf_dir, [parse_spec("rtn-b2-g16")], [tmp_path], calibration, evaluation, compute, start("cpu"))
    (plain,), (by_block,) = measure(*common), measure(*common, True)
    write_json(tmp_path / "result.json", by_block)
    measured = read_measured(tmp_path / "result.json")
    for result in (measured, plain["measured"]):
        result.pop("blocks", None), result.pop("units")
    assert measured == plain["measured"]
    draw_results([tmp_path], tmp_path / "blocks.png")
    with Image.open(tmp_path / "blocks.png") as image:
        assert image.width > 2000
