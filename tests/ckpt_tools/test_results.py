import os

import pytest

from base.errors import UserError
from ckpt_tools.hf.directory import result_directories
from ckpt_tools.hf.measured import Curvature, MeasuredStep, Quantization, Slice, Tasks
from ckpt_tools.hf.results import read_result
from tests.sealing import reseal

SPECS = {
    Quantization: {"name": "gptq-b3-g128", "method": "gptq", "evaluation": {"sha256": "ab"}},
    Tasks: {"name": "gptq-b3-g128", "method": "gptq", "tasks": {"piqa": {}}},
    Curvature: {"name": "hutchinson", "data": {"bin_sha256": "ab"}},
    MeasuredStep: {"name": "step-gptq-b3-g128", "data": {}, "quantized": {"spec": "gptq-b3-g128"}},
    Slice: {"name": "slice-random", "data": {}, "plane": "random"},
}


def written(path, spec, measured):
    reseal(path, {"model": {"path": "m"}, "spec": spec, "measured": measured})
    return path


@pytest.mark.parametrize("kind", SPECS)
def test_the_spec_says_of_which_kind_a_result_is(tmp_path, kind):
    path = written(tmp_path / "result.json", SPECS[kind], {})
    for place in (path, tmp_path):
        result = read_result(place)
        assert (type(result.measured), result.path) == (kind, path)
        assert result.settings == SPECS[kind]
        assert read_result(place, kind) == result
    other = MeasuredStep if kind is not MeasuredStep else Slice
    with pytest.raises(UserError, match=r"is a result of .*; give one of"):
        read_result(path, other)


def test_columns_of_another_version_are_empty_or_ignored(tmp_path):
    measured = {"cross_entropy": 2.5, "of_tomorrow": {"a": 1}, "blocks": [{"block": 0}]}
    measured["blocks"] = [{"block": 0, "alone": {"absolute_error": 0.1}}]
    result = read_result(written(tmp_path / "r.json", SPECS[Quantization], measured), Quantization)
    assert result.measured.cross_entropy == 2.5
    assert result.measured.kl_divergence is None
    assert result.measured.per_document.nll == []
    assert result.measured.blocks[0].alone.absolute_error == 0.1
    assert result.measured.blocks[0].all_but_it is None


def test_numbers_are_read_bit_for_bit(tmp_path):
    values = [0.1, 1e-309, 1.7976931348623157e308, 5e-324, 2.220446049250313e-16, 3]
    measured = {"per_document": {"nll": values}}
    result = read_result(written(tmp_path / "r.json", SPECS[Quantization], measured), Quantization)
    assert result.measured.per_document.nll == values


def test_a_result_without_settings_is_of_the_kind_that_is_asked_for(tmp_path):
    path = tmp_path / "result.json"
    reseal(path, {"measured": {"loss": 2.0}})
    assert read_result(path, Curvature).measured.loss == 2.0
    with pytest.raises(UserError, match="of no known kind"):
        read_result(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"is not valid JSON \(.*\); run the study again, or measure again with"),
        ("\N{SNOWMAN}\udcff", "is not valid JSON"),
        ("[1]", "holds no JSON object; run the study again"),
        ({"spec": {}}, "is not a result of a measurement; give one"),
        ({"measured": []}, r"is damaged \('measured': Input should be"),
        ({"measured": {}, "spec": None}, "is not a result of a measurement"),
        ({"measured": {"loss": "x"}}, r"is damaged \('measured.loss': .*; run the study again"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, content, message):
    path = tmp_path / "result.json"
    if isinstance(content, dict):
        reseal(path, content)
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=message):
        read_result(path, Curvature)


def test_a_missing_result_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"result.json does not exist; measure it"):
        read_result(tmp_path / "result.json")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "notes").write_text("keep")
    for out in (tmp_path / "notes", tmp_path / "notes" / "below" / "it"):
        with pytest.raises(UserError, match="notes is a file; give a directory"):
            result_directories([tmp_path], "quant", ["spec"], [out])
    fresh = tmp_path / "not" / "yet"
    assert result_directories([tmp_path], "quant", ["spec"], [fresh]) == [[fresh]]
    assert not fresh.parent.exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch, below):
    # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path != tmp_path)
    with pytest.raises(UserError, match="not writable; give another --out"):
        result_directories([tmp_path / "model"], "curvature", ["spec"], [tmp_path / below])


def test_a_model_that_is_missing_is_left_to_who_reads_it(tmp_path, monkeypatch):
    """Its name would say more than that of a place that another user may not write to."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    hf_dir = tmp_path / "model"
    expected = [[hf_dir / "quant" / "spec"]]
    assert result_directories([hf_dir], "quant", ["spec"], None) == expected
    hf_dir.mkdir()
    with pytest.raises(UserError, match="not writable; give another --out"):
        result_directories([hf_dir], "quant", ["spec"], None)
