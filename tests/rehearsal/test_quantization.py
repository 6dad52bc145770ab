"""`quant_eval run --device cuda`: the walk through the blocks, GPTQ and the paired losses."""

import json

import pytest
import torch

from quant_eval.model.activations import Activations
from quant_eval.rounding.gptq import gptq, prepare
from tests.conftest import make_hf_directory
from tests.quant_eval.gptq_reference import problem
from tests.quant_eval.models import make_model
from tests.quant_eval.specs import gptq_spec
from tests.rehearsal.conftest import left_behind, rehearse
from tests.rehearsal.stand_in import GPU, gpu


@pytest.fixture(scope="module")
def options(train_prefix, held_out_prefix):
    """Settings of a small measurement."""
    return [
        *("--calibration", train_prefix, "--eval", held_out_prefix, "--eval-tokens", 5000),
        *("--calibration-sequences", 5),
    ]


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        ("gptq-b3-g16", ["--per-block"]),
        ("gptq-b3-g16-actorder", []),
        ("gptq-b4-perchannel-asym", ["--dtype", "bf16"]),
        pytest.param("gptq-b3-g16-groupaware", [], marks=pytest.mark.stress),
        pytest.param("rtn-b3-g16", [], marks=pytest.mark.stress),
        ("gptq-b4-g16-a8-kv8-quarot", ["--dtype", "bf16"]),
        pytest.param("w8a8-baseq-smooth0.5-rhad", [], marks=pytest.mark.stress),
        pytest.param("nvfp4-duquant32", [], marks=pytest.mark.stress),
        ("gptq-mxfp4", []),
        ("fp8-astatic-kvfp8", []),
        pytest.param("atom-b4-g16-keep0.3-a8", [], marks=pytest.mark.stress),
        ("quik-b4-g16-keep0.3", []),
        pytest.param("w8a8-ostquant-blockwise-i2", [], marks=pytest.mark.stress),
        ("gptq-b4-g16-flatquant-blockwise-i2", []),
    ],
)
def test_a_quantization_on_a_gpu_reaches_the_figures_of_the_cpu(tmp_path, options, spec, more):
    # of two blocks: what one hands to the next
    model = make_hf_directory(tmp_path / "model", num_key_value_heads=2)
    rehearse(tmp_path, "quant_eval", "run", model, "--spec", spec, *options, *more)


def test_streams_that_find_no_room_on_a_gpu_are_copied_there_batch_by_batch(
    tmp_path, options, monkeypatch
):
    """A free GPU of less than the gigabyte that kernels take; also while the checkpoint is read."""
    kept_on_device = []

    class Recorded(Activations):
        def __init__(self, shapes, width, dtype, device, on_device):
            kept_on_device.append(on_device and device.type == "cuda")
            super().__init__(shapes, width, dtype, device, on_device)

    model = make_hf_directory(tmp_path / "model")
    monkeypatch.setattr("quant_eval.measuring.room.OTHER_BYTES", 81 * 10**9)
    monkeypatch.setattr("quant_eval.measuring.streams.Activations", Recorded)
    more = ("--spec", "gptq-b3-g16-s16", "--per-block", "--save")
    rehearse(tmp_path, "quant_eval", "run", model, *more, *options)
    assert not any(kept_on_device)
    streams = json.loads((tmp_path / "gpu" / "result.json").read_text())["spec"]["streams"]
    assert streams == {"on_device": False, "keeps_gated": False, "together": 1}


@pytest.mark.parametrize("groups", ["g32", "g144-asym", "perchannel", "g32-actorder-static"])
def test_columns_of_a_graph_have_the_codes_of_the_cpu(groups):
    """Two blocks of 128 columns and one of 32; a second weight takes the graphs of the first."""
    spec = gptq_spec(f"gptq-b3-{groups}")
    for seed in range(2):
        weight_OI, hessian_II = problem(seed)
        expected = gptq(weight_OI, prepare(hessian_II, spec, "layer"), spec)
        with gpu():
            prepared = prepare(hessian_II.to(GPU), spec, "layer")
            rounded = gptq(weight_OI.to(GPU), prepared, spec)
            assert torch.equal(rounded.codes_OI.cpu(), expected.codes_OI)
            assert torch.equal(rounded.scales_OG.cpu(), expected.scales_OG)


def test_a_trellis_on_a_gpu_reaches_the_figures_of_the_cpu(tmp_path, model, options):
    """One block is enough: a second would take as many seconds."""
    rehearse(tmp_path, "quant_eval", "run", model, "--spec", "qtip-b2-l4", *options)


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt_neox", "smollm3"])
def test_blocks_of_other_architectures_go_to_the_gpu_whole(tmp_path, options, architecture):
    model = make_model(tmp_path / "model", architecture, num_hidden_layers=1)
    rehearse(tmp_path, "quant_eval", "run", model, "--spec", "gptq-b3-g16", *options)


@pytest.mark.parametrize(
    "left",
    [
        "quant_eval/model/streamed.py StreamedModel._load",
        "quant_eval/model/streamed.py StreamedModel.context",
        "quant_eval/measuring/streams.py Stream.__init__",
        "quant_eval/model/activations.py Activations.__init__",
        "base/hessian.py InputHessian.__init__",
        "quant_eval/rounding/gptq.py _groups",
        "quant_eval/measuring/losses.py paired_losses",
    ],
)
def test_a_tensor_left_on_the_cpu_is_found(tmp_path, model, options, left):
    spec = ["--spec", "gptq-b3-g16-actorder"]
    left_behind(left, "quant_eval", "run", model, *spec, *options, "--out", tmp_path)
