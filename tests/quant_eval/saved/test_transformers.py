"""Saved checkpoints as `transformers.AutoModelForCausalLM.from_pretrained` loads them."""

import copy
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from quant_eval.libraries.job import process_environment
from tests.interpreter import interpreter
from tests.quant_eval.saved.examples import logits_of

NAMES = ("gptq-b3-g32-asym-actorder-s16", "gptq-b4-g32-asym-s16", "gptq-b4-g32-groupaware-s16")


@pytest.fixture(scope="module")
def logits(tmp_path_factory, examples):
    """Logits of some checkpoints, by name."""
    root = tmp_path_factory.mktemp("transformers")
    for directory in ("checkpoints", "logits"):
        (root / directory).mkdir()
    for name in NAMES:
        (root / "checkpoints" / name).symlink_to(examples[name].out)
    done = subprocess.run(
        [
            *(interpreter(), "-m", "tests.quant_eval.saved.transformers_witness"),
            *(str(root / "checkpoints"), str(root / "logits")),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=process_environment(threads=1)
        | {"GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1"},
        cwd=root,  # where gptqmodel leaves a log
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: load_file(root / "logits" / f"{name}.safetensors")["logits"] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_with_the_weights_that_were_measured(name, logits, examples):
    """In bf16, where the dense weights move the logits too: by as much, give or take a factor of
    two.

    A zero that is off by one, or groups in another order, move them by as much as they are.
    """
    exact = logits_of(examples[name].dense)
    rounded = logits_of(copy.deepcopy(examples[name].dense).to(torch.bfloat16)).float()
    moved = float((logits[name] - exact).norm() / exact.norm())
    assert moved <= 2 * float((rounded - exact).norm() / exact.norm())
    assert moved < 0.05
