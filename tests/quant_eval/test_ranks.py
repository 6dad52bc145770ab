"""`torchrun -m quant_eval run` with one process and with three, and unequal shares of the
calibration text.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from base.errors import UserError
from base.ranks import ALONE, Ranks, start
from quant_eval.rounding.gptq import scaled_inverse
from quant_eval.saved.gptq import unpack
from tests.quant_eval.models import make_model
from tests.runs import ranks, succeed


@pytest.fixture
def run_on_ranks(train_prefix, held_out_prefix):
    """Measures on so many ranks, calibrated on so many sequences."""

    def run(size, model, sequences, *words):
        texts = ("--calibration", train_prefix, "--eval", held_out_prefix, "--eval-tokens", 5000)
        command = ("run", model, *texts, "--calibration-sequences", sequences, *words)
        succeed(ranks(size, "quant_eval", *map(str, command)))

    return run


def test_ranks_change_neither_weights_nor_losses(tmp_path, run_on_ranks):
    """13 sequences are not a multiple of 3 ranks, nor of the 4 of a batch."""
    model = make_model(
        tmp_path / "model", "llama", hidden_size=64, intermediate_size=288, attention_bias=False
    )
    directories = tmp_path / "1", tmp_path / "3"
    for size, out in zip((1, 3), directories, strict=True):
        words = ("--spec", "gptq-b3-g16-actorder-s16", "--out", out, "--save")
        run_on_ranks(size, model, 13, *words)
    tensors, other = (load_file(path / "checkpoint/model.safetensors") for path in directories)
    linears = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]

    def codes(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        packed = ("qweight", "qzeros", "scales", "g_idx")
        parts = ({key: tensors[f"{linear}.{key}"] for key in packed} for linear in linears)
        return torch.cat([unpack(part, 3, "gptq").codes_OI.flatten() for part in parts])

    are_equal = codes(tensors) == codes(other)
    assert len(are_equal) > 90_000
    assert float(are_equal.double().mean()) >= 0.999
    measured = [json.loads((path / "result.json").read_text())["measured"] for path in directories]
    assert measured[1]["cross_entropy"] == measured[0]["cross_entropy"]
    for figure in ("cross_entropy_quantized", "kl_divergence"):
        assert measured[1][figure] == pytest.approx(measured[0][figure], rel=1e-4)
    for layer, same in zip(*(figures["layers"] for figures in measured), strict=True):
        error = pytest.approx(layer["relative_output_error"], rel=2e-3)
        assert same["relative_output_error"] == error
    assert measured[1]["reloaded"]["relative_difference"] <= 1e-6  # and the checkpoint is proven


KINDS = (
    *("w8a8-baseq-smooth0.5-quarot", "gptq-b3-g16-a8-kv8-quarot", "nvfp4", "fp8-astatic", "kvfp8"),
    *("atom-b4-g16-keep0.3-a8", "quik-b3-g16-keep0.3", "qtip-b3-l6", "rtn-b4-g16-rhad"),
    *("gptq-nvfp4-a16", "w8a8-duquant32", "w8a8-ostquant-blockwise-i2"),
)


def test_every_kind_of_spec_measures_the_same_on_ranks(tmp_path, run_on_ranks):
    model = make_model(tmp_path / "model", "olmo2", num_hidden_layers=1)
    measured = {}
    for size in (1, 2):
        outs = {kind: tmp_path / str(size) / kind for kind in KINDS}
        words = [word for kind, out in outs.items() for word in ("--spec", kind, "--out", out)]
        run_on_ranks(size, model, 7, *words)
        for kind, out in outs.items():
            measured[kind, size] = json.loads((out / "result.json").read_text())["measured"]
    for kind in KINDS:
        alone, shared = measured[kind, 1], measured[kind, 2]
        assert alone["kl_divergence"] > 0
        # Hessians are summed in another order: rounding noise moves single codes
        assert shared["kl_divergence"] == pytest.approx(alone["kl_divergence"], rel=0.02), kind
        for layer, same in zip(shared["layers"], alone["layers"], strict=True):
            error = "relative_weight_error"
            assert layer[error] == pytest.approx(same[error], rel=0.02), kind


def test_shares_cover_everything_once():
    for count in (0, 1, 2, 7, 13):
        for size in (1, 2, 3, 5):
            shares = [Ranks(rank, size, torch.device("cpu")).share(count) for rank in range(size)]
            assert [index for share in shares for index in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


class _Silent(Ranks):
    """A rank that others hear nothing from."""

    def broadcast(self, tensor, owner):
        """Keep what this rank computed."""


def test_parts_of_the_inverse_have_the_same_bits_on_any_number_of_ranks():
    generator = torch.Generator().manual_seed(0)
    rows_NI = torch.randn(900, 700, dtype=torch.float64, generator=generator)
    lower_II = torch.linalg.cholesky(rows_NI.T @ rows_NI)
    whole_II = scaled_inverse(lower_II, ALONE)
    expected_II = lower_II.diagonal()[:, None] * torch.linalg.inv(lower_II)
    torch.testing.assert_close(whole_II, expected_II, rtol=1e-12, atol=1e-12)
    parts = [scaled_inverse(lower_II, _Silent(rank, 4, ALONE.device)) for rank in range(4)]
    assert torch.equal(torch.stack(parts).sum(0), whole_II)  # each part is one rank's alone
    assert all(part_II.any() for part_II in parts)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="has 1 GPUs for rank 1; start fewer"):
        start("cuda")
