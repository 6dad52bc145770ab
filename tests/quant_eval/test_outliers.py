"""`python -m quant_eval outliers` against plain forward passes with hooks; ranks change nothing."""

import json

import numpy as np
import pytest
import torch

from base.ranks import ALONE
from ckpt_tools.hf.measured import Outliers
from ckpt_tools.hf.model import load_hf_model
from quant_eval.__main__ import app
from quant_eval.measuring.losses import evaluation_set
from quant_eval.measuring.outliers import measure
from quant_eval.settings import OutlierRunSettings
from tests.plain_outliers import linears_of, plain_figures, plain_inputs, plain_weight
from tests.published import change_weights
from tests.quant_eval.models import make_model
from tests.runs import ranks, succeed
from train.data.corpus import open_corpus

LENGTH = 64


def measured_of(hf_dir, held_out_prefix):
    settings = OutlierRunSettings(data=held_out_prefix, sequence_length=LENGTH)
    return Outliers.model_validate(measure(hf_dir, settings, ALONE)["measured"])


def plain_documents(model, held_out_prefix):
    """The inputs of every linear for each document, by name: [L, I] each."""
    data = evaluation_set(open_corpus(held_out_prefix), LENGTH, None, "separate", 0)
    assert min(map(len, data.blocks)) < LENGTH  # so that batches are padded
    parts: dict[str, list[list[np.ndarray]]] = {
        name: [[] for _ in data.documents] for name in linears_of(model)
    }
    for owner, block in zip(data.owner, data.blocks, strict=True):
        for name, input_LI in plain_inputs(model, torch.from_numpy(block)[None, :-1]).items():
            parts[name][owner].append(input_LI)
    return {name: [np.concatenate(each) for each in rows] for name, rows in parts.items()}


@pytest.mark.parametrize("name", ["olmo2", "gpt_neox"])
def test_statistics_are_those_of_plain_forward_passes(tiny, held_out_prefix, name):
    """Norms after the parts of a block and before, sequential and parallel blocks."""
    measured = measured_of(tiny(name), held_out_prefix)
    model = load_hf_model(tiny(name), torch.float32, "eager")
    inputs, linears = plain_documents(model, held_out_prefix), linears_of(model)
    assert [linear.name for linear in measured.linears] == list(linears)
    for linear in measured.linears:
        weight_OI = plain_weight(linears[linear.name])
        expected = plain_figures(np.concatenate(inputs[linear.name]), weight_OI)
        # fp32 forward passes of padded batches
        assert linear.model_dump(exclude={"name"}) == pytest.approx(expected, rel=1e-4)
    for figure, row in measured.figures.items():
        values = {linear.name: getattr(linear, figure) for linear in measured.linears}
        assert row.mean == pytest.approx(np.mean(list(values.values())))
        assert (row.max, row.linear) == max((value, key) for key, value in values.items())


def test_the_standard_error_is_that_of_leaving_out_each_document(tmp_path, held_out_prefix):
    hf_dir = make_model(tmp_path / "model", "olmo2", num_hidden_layers=1)
    measured = measured_of(hf_dir, held_out_prefix)
    model = load_hf_model(hf_dir, torch.float32, "eager")
    inputs, linears = plain_documents(model, held_out_prefix), linears_of(model)
    means = []
    for left_out in range(measured.documents):
        rows = []
        for name, linear in linears.items():
            kept = [part for index, part in enumerate(inputs[name]) if index != left_out]
            rows.append(plain_figures(np.concatenate(kept), plain_weight(linear)))
        means.append({figure: np.mean([row[figure] for row in rows]) for figure in rows[0]})
    for figure, row in measured.figures.items():
        values = [mean[figure] for mean in means]
        # The variance of n values about their mean, times n - 1; fp32 figures differ by 1e-3 of it.
        expected = np.sqrt((len(values) - 1) * np.var(values))
        if figure.startswith("weight"):
            assert row.standard_error is None
        else:
            assert row.standard_error == pytest.approx(expected, rel=1e-2)


def test_ranks_change_no_bit_and_a_result_is_kept(tiny, tmp_path, held_out_prefix, in_process):
    """Four batches for two ranks; a linear that reads zeros has no statistics."""
    hf_dir = make_model(tmp_path / "model", "olmo2", num_hidden_layers=2)
    dead = "model.layers.1.self_attn"
    change_weights(hf_dir, **{f"{dead}.v_proj.weight": torch.zeros(32, 32)})
    words = ("outliers", hf_dir, "--data", held_out_prefix, "--sequence-length", LENGTH)
    measured = {}
    for size in (1, 2):
        out = tmp_path / str(size)
        succeed(ranks(size, "quant_eval", *map(str, (*words, "--out", out))))
        measured[size] = json.loads((out / "result.json").read_text())["measured"]
    assert measured[2] == measured[1]
    nulls = {
        (linear["name"], kind)
        for linear in measured[1]["linears"]
        for kind in ("input", "weight")
        if linear[f"{kind}_kurtosis"] is None
    }
    assert nulls == {(f"{dead}.o_proj", "input"), (f"{dead}.v_proj", "weight")}
    # Neither the mean over linears nor the largest is defined: the linear is named.
    undefined = {"mean": None, "max": None}
    assert measured[1]["figures"]["input_kurtosis"] == undefined | {"linear": f"{dead}.o_proj"}
    assert measured[1]["figures"]["weight_kurtosis"] == undefined | {"linear": f"{dead}.v_proj"}

    before = (tmp_path / "1/result.json").stat().st_mtime_ns
    printed = in_process(app, "quant_eval", *map(str, (*words, "--out", tmp_path / "1")))
    assert "kept, measured before" in str(printed)
    assert (tmp_path / "1/result.json").stat().st_mtime_ns == before
