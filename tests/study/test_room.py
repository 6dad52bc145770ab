"""Room on the disk: sizes against transformers' own models, and where the line is drawn."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from base.errors import UserError
from study.definition import Study
from study.machine.disk import check_room, needed_bytes
from tests.study.ablation import tiny


@pytest.fixture(scope="module")
def study() -> Study:
    return tiny()


@pytest.fixture(scope="module")
def model(study) -> Olmo2ForCausalLM:
    settings = study.runs[0].model
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    shape: dict[str, Any] = {name: getattr(settings, name) for name in names}
    with torch.device("meta"):
        return Olmo2ForCausalLM(
            Olmo2Config(num_attention_heads=4, tie_word_embeddings=False, **shape)
        )


def test_needs_are_those_of_transformers_models_and_the_runs_state(study, model):
    """4 runs in fp32 of 7 checkpoints, LAWA of 5 at each save and at 3 of them measured, 2
    soups, 3 specs by block.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    blocks = model.model.layers.modules()
    linear = sum(module.weight.numel() for module in blocks if isinstance(module, torch.nn.Linear))
    state = 4 + 4 + 8 + 5 * 4  # weight, main weight, moments and LAWA's five slots
    assert needed_bytes(study) == {
        "checkpoints": 4 * 7 * parameters * (state + 4),
        "exports": 4 * (7 + 3 + 2) * parameters * 4,
        "quantized weights": 4 * 3 * linear * 4,
    }


def filesystem(monkeypatch, free: int) -> None:
    """Every file system has so many bytes left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_the_line_is_drawn_at_what_is_left_to_write_and_the_reserve(study, tmp_path, monkeypatch):
    needed = sum(needed_bytes(study).values())
    filesystem(monkeypatch, needed + 2 * 10**9)
    check_room(study, tmp_path / "not" / "there" / "yet", reserve_gb=2)
    filesystem(monkeypatch, needed + 2 * 10**9 - 1)
    with pytest.raises(
        UserError, match=r"tiny will write 1.2 GB more .checkpoints 0.98, exports 0.17, quantized"
    ):
        check_room(study, tmp_path, reserve_gb=2)


def test_what_lies_there_already_counts_once_and_only_for_its_kind(study, tmp_path, monkeypatch):
    needed = needed_bytes(study)
    run = tmp_path / "tiny" / study.runs[0].name
    for place, size in (
        ("checkpoints/step00000064/shard", 1_000_000),
        ("restarts/step00000070/shard", 10 * needed["checkpoints"]),  # they go at the end
        (
            "hf/step00000064/model.safetensors",
            10 * needed["exports"],
        ),  # more than is needed helps no other kind
        ("hf/step00000064/blocks/gptq-b3-g32/dense/block00000.safetensors", 70_000),
        (
            "quarantine/step00000032/shard",
            10 * needed["checkpoints"],
        ),  # a damaged one is written again
    ):
        (run / place).parent.mkdir(parents=True)
        with (run / place).open("wb") as file:
            file.truncate(size)
    left = needed["checkpoints"] - 1_000_000 + needed["quantized weights"] - 70_000
    filesystem(monkeypatch, left)
    check_room(study, tmp_path, reserve_gb=0)
    filesystem(monkeypatch, left - 1)
    with pytest.raises(UserError, match="take a root on another"):
        check_room(study, tmp_path, reserve_gb=0)


def test_the_real_file_system_is_asked(study, tmp_path):
    check_room(study, tmp_path, reserve_gb=0)
    with pytest.raises(UserError, match=r"1,000,000,000.0 GB are reserved"):
        check_room(study, tmp_path, reserve_gb=1e9)
