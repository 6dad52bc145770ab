"""The measurements of `python -m curvature` with `--device cuda`, against those on the CPU."""

from typing import Any

import pytest
import torch

from base.ranks import Ranks
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from tests.conftest import make_hf_directory
from tests.curvature.architectures.variants import VARIANTS
from tests.curvature.conftest import gaussian, random_tokens, tiny_model
from tests.rehearsal.conftest import command, left_behind, rehearse
from tests.rehearsal.stand_in import GPU, MixedDevicesError, gpu

FIXED = ["--max-iterations", 3, "--fixed-sequences", 2]
SPECS = {
    "hutchinson": ["--pairs", 2, "--norm-pairs", 2, "--companion-pairs", 2, *FIXED],
    "lanczos": ["--largest", 2, "--smallest", 1, "--steps", 2, *FIXED],
}


@pytest.fixture(scope="module")
def text(held_out_prefix):
    """Inputs of all measurements."""
    return ["--data", held_out_prefix, "--sequence-length", 8, "--microbatch-sequences", 1]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, model, train_prefix, held_out_prefix):
    """The result of quantizing the model, with its weights."""
    out = tmp_path_factory.mktemp("quantized") / "rtn-b3-g16"
    texts = ["--calibration", train_prefix, "--eval", held_out_prefix, "--eval-tokens", 5000]
    few = ["--calibration-sequences", 3]
    command(
        "quant_eval", "run", model, "--spec", "rtn-b3-g16", "--dense", *texts, *few, "--out", out
    )
    return out


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        ("hutchinson", []),
        ("lanczos", ["--checkpointing", "--vectors", "host"]),
    ],
)
def test_a_measurement_on_a_gpu_reaches_the_figures_of_the_cpu(tmp_path, model, text, spec, more):
    rehearse(tmp_path, "curvature", spec, model, *text, *SPECS[spec], *more)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("olmo2", torch.float32),
        ("olmo2", torch.bfloat16),
        ("llama-tied", torch.float32),
        ("smollm3-tied", torch.float32),
        ("apertus", torch.float32),
        ("olmo3", torch.float32),
        ("gpt_neox", torch.float32),
    ],
)
def test_a_product_of_several_chunks_is_that_of_the_cpu(variant, dtype):
    """Queries and tokens in chunks, blocks checkpointed: what only long sequences meet."""
    chunks: dict[str, Any] = {"checkpointing": True, "queries_per_chunk": 3, "tokens_per_chunk": 5}
    results = []
    for device in (torch.device("cpu"), GPU):
        with gpu():
            model = tiny_model(torch.float32, **VARIANTS[variant]).to(device)
            hessian = DualHessian(
                CurvedModel(model, ranks=Ranks(0, 1, device), dtype=dtype, **chunks)
            )
            v_p = gaussian(hessian.parameters.size, dtype=torch.float32).to(device)
            loss, slope, hv_p = hessian.product(random_tokens(), v_p)
            results.append([loss, slope, *hv_p.tolist()])
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def step(text, quantized):
    return [*text, "--quantized", quantized, "--microbatches", 2]


@pytest.fixture(scope="module")
def plane(tmp_path_factory, held_out_prefix, quantized):
    """Words of a plane through the model and two others."""
    root = tmp_path_factory.mktemp("others")
    others = [
        make_hf_directory(root / str(seed), seed=seed, num_hidden_layers=1, num_key_value_heads=2)
        for seed in (1, 2)
    ]
    return [*others, "--data", held_out_prefix, "--grid", 3, "--sequences", 3]


def test_a_step_on_a_gpu_reaches_the_figures_of_the_cpu(tmp_path, model, step):
    rehearse(tmp_path, "curvature", "step", model, *step)


@pytest.mark.parametrize("kind", ["slice", "pca"])
def test_a_plane_on_a_gpu_reaches_the_figures_of_the_cpu(tmp_path, model, plane, kind):
    rehearse(tmp_path, "curvature", kind, model, *plane)


@pytest.mark.parametrize(
    ("left", "spec"),
    [
        ("curvature/subject.py WeightFiles.empty", "hutchinson"),
        ("curvature/products/model.py CurvedModel._share", "hutchinson"),
        ("curvature/products/model.py _Entry._dual_loss", "hutchinson"),
        ("curvature/dual/attention.py _chunks", "hutchinson"),
        ("base/random_words.py words", "hutchinson"),
        ("curvature/trace/gauss_newton.py ggn_loss", "hutchinson"),
        ("curvature/trace/gauss_newton.py fisher_loss", "hutchinson"),
        ("curvature/products/parameters.py Parameters.inner", "lanczos"),
    ],
)
def test_a_tensor_left_on_the_cpu_is_found(tmp_path, model, text, left, spec):
    left_behind(left, "curvature", spec, model, *text, *SPECS[spec], "--out", tmp_path)


def test_a_tensor_left_on_the_cpu_is_found_in_a_step(tmp_path, model, step, monkeypatch):
    """A step that does not go where the vectors are: `take` with a fault planted in it."""
    monkeypatch.setattr(
        "curvature.products.parameters.Parameters.take",
        lambda self, tensors: torch.zeros(self.size),
    )
    with gpu(), pytest.raises(MixedDevicesError):
        command("curvature", "step", model, *step, "--out", tmp_path, "--device", "cuda")


def test_a_tensor_left_on_the_cpu_is_found_in_a_slice(tmp_path, model, plane):
    left = "curvature/slices/plane.py SequenceLosses.__init__"
    left_behind(left, "curvature", "slice", model, *plane, "--out", tmp_path / "out")
