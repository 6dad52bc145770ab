"""Methods of other projects in the same walk as our own, through `measure`."""

import pytest
import torch

from base.errors import UserError
from base.ranks import ALONE
from ckpt_tools.hf.directory import write_result
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from quant_eval.__main__ import _show
from quant_eval.libraries.job import Report, run_job
from quant_eval.measuring.measurement import measure
from quant_eval.specs import parse_spec
from tests.published import change_weights
from tests.quant_eval.models import make_model, run_settings

SPECS = tuple(
    parse_spec(name) for name in ("gptq-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "rtn-b3-g32")
)


@pytest.fixture(scope="module")
def settings(train_prefix, held_out_prefix):
    return run_settings(train_prefix, held_out_prefix)


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory, settings):
    """By spec; what the libraries leave behind is gone."""
    root = tmp_path_factory.mktemp("measured")
    outs = tuple(root / spec.name for spec in SPECS)
    entries = measure(tiny("olmo2"), SPECS, outs, settings, ALONE)
    assert not [path for out in outs if out.exists() for path in out.iterdir()]
    return {result["spec"]["name"]: result for result in entries}


def test_gptqmodel_and_our_gptq_cost_the_same_where_their_settings_agree(results):
    """Two programs, one algorithm: rounding flips are all that may differ."""
    ours, theirs = (results[name]["measured"] for name in ("gptq-b3-g32", "gptqmodel-b3-g32"))
    assert theirs["cross_entropy"] == ours["cross_entropy"]
    assert theirs["kl_divergence"] == pytest.approx(ours["kl_divergence"], rel=0.02)
    assert ours["kl_divergence"] < 0.8 * results["rtn-b3-g32"]["measured"]["kl_divergence"]
    for index, (layer, other) in enumerate(zip(ours["layers"], theirs["layers"], strict=True)):
        assert layer["name"] == other["name"]
        # q, k and v of the first block read the same; further on a flip in 32 inputs moves what the
        # others read
        tolerance = 2e-3 if index < 3 else 0.1
        assert other["relative_output_error"] == pytest.approx(
            layer["relative_output_error"], rel=tolerance
        )


def test_a_result_says_what_the_library_was_told(results):
    spec = results["gptqmodel-b3-g32"]["spec"]
    assert (spec["library"], spec["library_version"]) == ("gptqmodel", "7.6.0")
    config = spec["library_settings"]["quantize_config"]
    assert (
        config["bits"],
        config["group_size"],
        config["fallback"],
        config["damp_auto_increment"],
    ) == (3, 32, None, 0.0)
    assert "library_settings" not in results["gptq-b3-g32"]["spec"]


def test_errors_of_folded_linears_are_null(results):
    layers = results["awq-b3-g32"]["measured"]["layers"]
    assert len(layers) == 3 * 7
    assert all(layer["folded"] and layer["relative_output_error"] is None for layer in layers)


def test_a_dead_linear_is_measured_and_named(tmp_path, settings, capsys):
    """Values that are zero leave nothing to the output projection: in that block no draw of the
    text decides how it is rounded.
    """
    model = make_model(tmp_path / "model", "olmo2")
    name = "model.layers.1.self_attn.v_proj.weight"
    change_weights(model, **{name: torch.zeros(32, 32)})
    spec, two = parse_spec("gptq-b3-g32"), settings.model_copy(update={"calibration_seeds": 2})
    (result,) = measure(model, [spec], [tmp_path / "out"], two, ALONE)
    layers = result["measured"]["layers"]
    dead = ["model.layers.1.self_attn.o_proj"]
    assert [layer["name"] for layer in layers if layer["dead"]] == dead
    assert [layer["relative_output_error"] for layer in layers if layer["dead"]] == [0.0]

    write_result(tmp_path / "out", result)
    _show(read_result(tmp_path / "out", Quantization), "measured")
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"rounded: {dead[0]}")


def test_a_library_that_fails_leaves_nothing(tiny, tmp_path, settings, monkeypatch):
    def fails(job) -> Report:
        run_job(job.model_copy(update={"calibration": tmp_path / "absent"}))
        raise AssertionError

    monkeypatch.setattr("quant_eval.libraries.job.run_job", fails)
    with pytest.raises(UserError, match="spec gptqmodel-b3-g32: "):
        measure(tiny("olmo2"), SPECS[1:2], (tmp_path / "out",), settings, ALONE)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
