"""One model of each kind, saved in every way."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import make_hf_directory
from tests.quant_eval.models import make_model
from tests.quant_eval.saved.examples import SPECS, Example, save_example


@pytest.fixture(scope="session")
def source(tmp_path_factory, tokenizer_dir) -> Path:
    """An OLMo2 whose linears have several groups of 32 inputs and 64, 96 or 32 outputs, with a
    tokenizer.
    """
    directory = make_hf_directory(
        tmp_path_factory.mktemp("gptq") / "olmo2",
        hidden_size=64,
        intermediate_size=96,
        num_key_value_heads=2,
    )
    return Path(shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def neox(tmp_path_factory, tokenizer_dir) -> Path:
    """A Pythia with a tokenizer: fused query_key_value, biases, lm_head under another name."""
    directory = make_model(
        tmp_path_factory.mktemp("gptq") / "neox",
        "gpt_neox",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
    )
    return Path(shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def examples(tmp_path_factory, source, neox) -> dict[str, Example]:
    """A saved checkpoint of every spec, and two of a GPT-NeoX."""
    root = tmp_path_factory.mktemp("saved")
    saved = {name: save_example(source, root / name, name) for name in SPECS}
    for name in ("gptq-b3-g32-asym-s16", "gptq-b4-g32-actorder-s16"):
        saved[f"neox-{name}"] = save_example(neox, root / f"neox-{name}", name)
    return saved
