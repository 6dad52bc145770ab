"""Models filled row by row against transformers' own loading."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from base.errors import UserError
from base.ranks import ALONE
from ckpt_tools.hf.configuration import read_config
from curvature.products.model import CurvedModel
from curvature.settings import StepSettings
from curvature.subject import WeightFiles, open_model
from tests.curvature.architectures.variants import VARIANTS
from tests.curvature.conftest import tiny_model
from tests.published import KINDS, make_published

CPU = torch.device("cpu")


def resident_mib() -> float:
    """Memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_weight_and_constant_is_the_files(tmp_path, monkeypatch, variant, dtype):
    """Rows are read one at a time, as those of a large matrix are in parts."""
    monkeypatch.setattr("curvature.subject.BYTES_AT_ONCE", 1)
    tiny_model(torch.float32, **VARIANTS[variant]).to(dtype).save_pretrained(tmp_path)
    files = WeightFiles(tmp_path, read_config(tmp_path))
    model = files.empty(CPU)
    curved = CurvedModel(model, ranks=ALONE)
    files.fill(curved.parameters)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert set(curved.parameters.weights) == dict(expected.named_parameters()).keys()
    for name, weight in curved.parameters.weights.items():
        assert torch.equal(weight, expected.get_parameter(name)), name
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("kind", KINDS)
def test_directories_of_others_are_read_as_transformers_reads_them(tmp_path, kind):
    """Whatever else is in their files, and beside them."""
    directory = make_published(tmp_path / "model", kind)
    files = WeightFiles(directory, read_config(directory))
    curved = CurvedModel(files.empty(CPU), ranks=ALONE)
    files.fill(curved.parameters)
    expected = dict(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters()
    )
    weights = curved.parameters.weights
    assert expected.keys() >= weights.keys()
    assert expected.keys() - weights.keys() <= {"lm_head.weight"}  # the embedding, of a tied one
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


def test_an_empty_model_takes_no_memory_before_it_is_filled(tmp_path):
    """A model of more than 100 million weights, 400 MiB."""
    tiny_model(torch.float32).save_pretrained(tmp_path)
    files = WeightFiles(tmp_path, read_config(tmp_path))
    wide = read_config(tmp_path)
    wide.hidden_size, wide.intermediate_size, wide.num_hidden_layers = 2048, 8192, 2
    files._config = wide
    before = resident_mib()
    empty = files.empty(CPU)
    assert sum(weight.numel() for weight in empty.parameters()) > 100e6
    assert resident_mib() - before < 64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_without_a_compiler_says_so(tmp_path, monkeypatch, capsys, device):
    monkeypatch.setattr("curvature.subject.has_compiler", lambda: False)
    ranks = ALONE._replace(device=torch.device(device))
    with pytest.raises(UserError):  # no model is there
        open_model(tmp_path, StepSettings(), tmp_path, ranks, needed=1)
    assert ("install gcc, or set CC" in capsys.readouterr().err) == (device == "cuda")
