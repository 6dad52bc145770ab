"""Keys of config.json in the form of transformers 5 and in the older one, by transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from base.errors import UserError
from ckpt_tools.averaging import average_models
from ckpt_tools.export import export
from ckpt_tools.hf.configuration import complete_configuration, read_config
from ckpt_tools.importing import import_checkpoint
from tests.conftest import make_hf_directory
from tests.published import make_published
from tests.quant_eval.models import ARCHITECTURES, SHAPE

NEWER = {"rope_parameters", "dtype"}
OLDER = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype"}
NEOX_OLDER = {"rotary_emb_base", "rotary_pct"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
}


def write_config(directory: Path, name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 5 writes it, without weights."""
    kind, settings = ARCHITECTURES[name]
    config = CONFIG_MAPPING[kind](**(SHAPE | settings | {"rope_parameters": rope}))
    config.architectures, config.dtype = ["Any"], torch.bfloat16
    config.save_pretrained(directory)
    written: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return written


def reads(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Dtype and rotary embedding of a config.json, as transformers understands it."""
    (directory / "config.json").write_text(json.dumps(config))
    understood = AutoConfig.from_pretrained(directory)
    return {"dtype": understood.dtype, "rope": understood.rope_parameters}


@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.parametrize("name", ["olmo2", "llama", "qwen3", "smollm3", "apertus", "gpt_neox"])
def test_either_form_says_the_same_to_transformers(tmp_path, name, scaling):
    """The newer keys alone, the older alone, and both."""
    rope = ROPES[scaling] | {"rope_theta": 7_000.0}
    if name == "gpt_neox":
        rope["partial_rotary_factor"] = 0.5
    newer = write_config(tmp_path, name, rope)
    assert newer.keys() >= NEWER
    assert not newer.keys() & (OLDER | NEOX_OLDER)
    expected = {"dtype": torch.bfloat16, "rope": rope}
    assert reads(tmp_path, newer) == expected

    complete_configuration(tmp_path, "bf16", extra=1)
    both = json.loads((tmp_path / "config.json").read_text())
    read_config(tmp_path)  # which refuses forms that differ
    assert both["extra"] == 1
    assert {key: both[key] for key in newer} == newer
    assert reads(tmp_path, both) == expected
    if (name, scaling) == ("apertus", "default"):
        return  # transformers 5 scales an Apertus whose older keys say that it is not scaled
    older = {key: value for key, value in both.items() if key not in NEWER}
    assert reads(tmp_path, older) == expected

    complete_configuration(tmp_path, "bf16", extra=1)  # from the older keys
    assert json.loads((tmp_path / "config.json").read_text()) == both


def by_kind(theta: float = 7_000.0, **of_full: Any) -> dict[str, Any]:
    full = ROPES["yarn"] | {"rope_theta": 7_000.0} | of_full
    return {"sliding_attention": ROPES["default"] | {"rope_theta": theta}, "full_attention": full}


def test_one_base_for_all_layers_and_a_scaling_of_those_with_full_attention(tmp_path):
    """Olmo 3, as its published files have it; transformers 5 takes the default base for the layers
    in windows, whatever the older key says.
    """
    newer = write_config(tmp_path, "olmo3", by_kind())
    complete_configuration(tmp_path, "bf16")
    both = json.loads((tmp_path / "config.json").read_text())
    assert both["rope_theta"] == 7_000.0
    assert both["rope_scaling"] == ROPES["yarn"]
    assert reads(tmp_path, both) == reads(tmp_path, newer)
    read_config(tmp_path)
    published = both | {"rope_theta": 5e5, "rope_parameters": by_kind(5e5, rope_theta=5e5)}
    older = {key: value for key, value in published.items() if key not in NEWER}
    assert reads(tmp_path, older) == reads(tmp_path, published)
    read_config(tmp_path)


CONFLICTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_theta": 10_000}, "rope_theta is 10000, but rope_parameters is"),
    (
        "olmo2",
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": ROPES["linear"]},
        "rope_scaling is",
    ),
    ("llama", {"rope_scaling": {"rope_type": "default"}}, "rope_theta is missing"),
    (
        "llama",
        {"partial_rotary_factor": 0.5, "rope_scaling": ROPES["linear"] | {"rope_theta": 1e4}},
        "rope_theta is 10000.0, but",
    ),
    ("llama", {"torch_dtype": "float32"}, "torch_dtype is 'float32', but dtype is 'bfloat16'"),
    ("gpt_neox", {"rotary_emb_base": 10_000}, "rotary_emb_base is 10000, but rope_parameters"),
    ("gpt_neox", {"rotary_pct": 0.25}, "rotary_pct is 0.25, but rope_parameters is"),
    ("olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0, but rope_parameters is"),
    # which transformers 5 reads for full attention alone
    ("olmo3", {"rope_theta": 1e4, "rope_parameters": None}, "rope_theta is 10000.0, but"),
    (
        "olmo3",
        {"rope_theta": 7e3, "rope_scaling": None, "rope_parameters": by_kind()},
        "rope_scaling is None, but",
    ),
    ("olmo3", {"rope_theta": 7e3, "rope_parameters": by_kind(8e3)}, "rope_theta is 7000.0, but"),
]


@pytest.mark.parametrize(("name", "older", "expected"), CONFLICTS)
def test_forms_that_differ_are_refused(tmp_path, name, older, expected):
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    config = write_config(tmp_path, name, by_kind() if name == "olmo3" else rope)
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    with pytest.raises(UserError, match=expected):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        (
            ROPES["default"],
            {"rope_theta": 500_000, "rope_scaling": None, "torch_dtype": "bfloat16"},
        ),
        (ROPES["default"], {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}),
        (ROPES["linear"], {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8}}),
        (ROPES["linear"], {"rope_scaling": ROPES["linear"] | {"rope_theta": 5e5}}),
        (
            ROPES["yarn"] | {"original_max_position_embeddings": 64},  # the context, as if left out
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}},
        ),
    ],
)
def test_forms_that_mean_the_same_are_read(tmp_path, rope, older):
    config = write_config(tmp_path, "llama", rope | {"rope_theta": 5e5})
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    assert read_config(tmp_path).rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize("kind", ["newer", "older"])
def test_what_is_written_from_the_files_of_others_has_both_forms(tmp_path, kind):
    """Averages, and exports of imports; exports of runs and saved checkpoints: in their tests."""
    source = tmp_path / "source"
    if kind == "newer":
        make_hf_directory(source)
    else:
        make_published(source, "old-llama")
    average_models(tmp_path / "average", [source, shutil.copytree(source, tmp_path / "other")])
    import_checkpoint(str(source), tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "export")
    theta = 500_000.0 if kind == "newer" else 20_000.0
    for directory in (tmp_path / "average", tmp_path / "export"):
        config = json.loads((directory / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
        assert config["torch_dtype"] == config["dtype"] == "float32"
        assert config["rope_scaling"] is None
