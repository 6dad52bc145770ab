"""The plan against sums worked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.runs import error_line, make_run, python
from train.__main__ import app
from train.command import UserError
from train.models import OLMO2_7B, OLMO2_13B, OLMO2_32B
from train.settings import BranchFrom, DataConfig, Ema, Lawa, SavingConfig, ZeroConfig

PATHS: dict[str, Any] = {"train_prefix": Path("t"), "held_out_prefix": Path("h"), "tokenizer_dir": Path("k")}
OLMO2_DATA = DataConfig(train="t", held_out="h", tokenizer="k", sequence_length=4096, held_out_sequences=1)
OLMO2_SETTINGS: dict[str, Any] = {"precision": "bf16", "batch_size": 1024, "micro_batch_size": 1, "data": OLMO2_DATA}
P_7B = 7_298_617_344


def plan(*arguments: str, out: Path) -> dict:
    done = CliRunner().invoke(app, ["plan", *arguments, "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(out.read_text()) | {"text": done.stdout}


def components(memory: dict) -> dict[str, int]:
    return {part["name"]: part["bytes"] for part in memory["components"]}


def test_the_300b_ablation(tmp_path):
    """Four OLMo2-7B of 350e9 tokens at 10,000 tokens/s/GPU: 4 x 350e9 / 1e4 / 3600 = 38,889 H100-hours."""
    names = ["lr3e-4", "lr6e-4", "lr9e-4", "lr12e-4"]
    for name in names:
        changes: dict[str, Any] = {
            "total_steps": 83_447,
            "save_steps": (*range(4000, 83_447, 4000), 83_447),
        } | OLMO2_SETTINGS
        make_run(tmp_path / name, **PATHS, model=OLMO2_7B, peak_lr=float(name[2:]), **changes)
    speed = ("--nodes", "8", "--gpus-per-node", "8", "--gpu", "h100", "--tokens-per-second-per-gpu", "10000")
    found = plan(*(str(tmp_path / name) for name in names), *speed, out=tmp_path / "plan.json")
    assert "7,298,617,344 parameters, 47.8 GFLOP per token" in found["text"]
    assert found["sum"]["gpu_hours"] == pytest.approx(38_889, abs=0.5)
    assert found["sum"]["days"] == pytest.approx(38_889 / 64 / 24, rel=1e-4)
    run = found["runs"][0]
    assert run["parameters"] == P_7B
    assert run["flops_per_token"] == pytest.approx(47.8e9, rel=1e-3)
    assert run["mfu"] == pytest.approx(0.48, abs=0.01)  # OLMo-core reports 47 to 48%
    assert run["checkpoints"]["each"] == 14 * P_7B  # bf16 weights, fp32 main weights, two moments
    assert run["checkpoints"]["trajectory"] == 21 * 14 * P_7B
    held = components(run["memory"])
    assert held["weights"] == 2 * P_7B
    assert held["gradients, fp32"] == 4 * P_7B
    assert held["main weights, fp32"] == pytest.approx(4 * P_7B / 64, abs=4)
    assert held["Adam's moments, fp32"] == pytest.approx(8 * P_7B / 64, abs=8)
    assert run["memory"]["fits"] is False
    assert "DOES NOT FIT" in found["text"]
    assert run["layouts"][0]["changes"]["recompute"] == "layers"  # 51 GB of state leave no room for 32 layers
    assert run["layouts"][0]["words"] == "tensor 1, pipeline 1"
    assert all(layout["memory"]["bytes"] <= 80e9 for layout in run["layouts"])


def test_speed_by_mfu_disk_of_averages_and_a_branch(tmp_path):
    """At 47% of 989 TFLOP/s an OLMo2-7B sees 9,731 tokens/s; a branch trains on its own tokens only."""
    make_run(
        tmp_path / "branch",
        **PATHS,
        **OLMO2_SETTINGS,
        model=OLMO2_7B,
        averages=(Lawa(interval_steps=500, window=5), Ema(decay=0.999)),
        branch_from=BranchFrom(run="../lr3e-4", step=72_000, fingerprint="0" * 16),
        saving=SavingConfig(restart_every_steps=1000, restart_keep=3),
        total_steps=83_921,
        save_steps=(80_000, 83_921),
    )
    speed = ("--nodes", "1", "--gpus-per-node", "8", "--gpu", "h200", "--mfu", "0.47")
    run = plan(str(tmp_path / "branch"), *speed, out=tmp_path / "plan.json")["runs"][0]
    assert run["tokens_per_second_per_gpu"] == pytest.approx(9731, abs=1)
    assert run["tokens"] == 11_921 * 4_194_304
    disk = run["checkpoints"]
    assert disk["each"] == (14 + 4 * 6) * P_7B  # five members of the window and one moving average
    assert disk["trajectory"] == (2 + 3) * disk["each"] + 2 * 2 * 2 * P_7B
    assert components(run["memory"])["averages, fp32"] == 4 * 6 * P_7B // 8


def test_what_does_not_fit_and_what_would(tmp_path):
    """bf16 weights and fp32 gradients take 6 bytes a parameter on every GPU of a replica, state 12 in all replicas.

    13B: 82 GB, too much for one A100, so a replica has two of them at least. 32B on 8 H100s: 18 bytes x 32.2e9 / 8 are
    72.5 GB when all form one replica, and two replicas of four would take 97 GB.
    """
    make_run(tmp_path / "13B", **PATHS, **OLMO2_SETTINGS, model=OLMO2_13B)
    make_run(tmp_path / "32B", **PATHS, **OLMO2_SETTINGS, model=OLMO2_32B)
    speed = ("--tokens-per-second-per-gpu", "100")
    a100 = ("--nodes", "4", "--gpus-per-node", "8", "--gpu", "a100")
    layouts = plan(str(tmp_path / "13B"), *a100, *speed, out=tmp_path / "13B.json")["runs"][0]["layouts"]
    sizes = [layout["changes"]["parallel"]["tensor"] * layout["changes"]["parallel"]["pipeline"] for layout in layouts]
    assert sizes[0] == 2
    assert sizes == sorted(sizes)
    h100 = ("--nodes", "1", "--gpus-per-node", "8", "--gpu", "h100")
    found = plan(str(tmp_path / "32B"), *h100, *speed, out=tmp_path / "32B.json")
    layouts = found["runs"][0]["layouts"]
    sizes = [layout["changes"]["parallel"]["tensor"] * layout["changes"]["parallel"]["pipeline"] for layout in layouts]
    assert set(sizes) <= {8}
    assert all(layout["changes"]["recompute"] == "layers" for layout in layouts)


def test_what_does_not_divide(tmp_path):
    """1,024 sequences do not divide over 24 replicas; over the 8 of tensor 3 they would, but 32 heads do not."""
    make_run(tmp_path / "zero", **PATHS, **OLMO2_SETTINGS, model=OLMO2_7B, engine="deepspeed", zero=ZeroConfig(stage=2))
    gpus = ("--nodes", "3", "--gpus-per-node", "8", "--gpu", "h100", "--tokens-per-second-per-gpu", "1e4")
    found = plan(str(tmp_path / "zero"), *gpus, out=tmp_path / "plan.json")
    run = found["runs"][0]
    assert run["memory"] is None
    assert "not a multiple of data-parallel size 24" in run["refusal"]
    assert run["layouts"] == []
    assert "no layout of 24 h100 fits" in found["text"]


def test_refusals(tmp_path):
    make_run(tmp_path / "run", **PATHS)
    command = ("plan", str(tmp_path / "run"), "--nodes", "1", "--gpus-per-node", "2", "--gpu")
    assert "--tokens-per-second-per-gpu 10000" in error_line(python("train", *command, "h100"))
    for arguments, reason in (
        (("h100", "--mfu", "0.4", "--tokens-per-second-per-gpu", "1e4"), "one speed"),
        (("b200", "--mfu", "0.4"), "h100, h200, a100"),
        (("h100", "--mfu", "40"), "--mfu 40"),
        (("h100", "--tokens-per-second-per-gpu", "nan"), "no speed"),
        (("a100", "--tokens-per-second-per-gpu", "1e12"), "of the peak"),
    ):
        with pytest.raises(UserError, match=reason):
            CliRunner().invoke(app, [*command, *arguments], catch_exceptions=False)
