"""The plan against sums worked by hand."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from tests.runs import make_run
from train.__main__ import app
from train.data.config import DataConfig
from train.model.config import ModelConfig
from train.model.presets import OLMO2_7B, OLMO2_13B, OLMO2_32B
from train.planning.memory import RankMemory
from train.planning.plan import Cluster, Layout, make_cluster, plan_run
from train.planning.report import print_plans
from train.run.config import BranchFrom, SavingConfig
from train.run.optimization import Ema, Lawa
from train.run.parallel import ZeroConfig

PATHS: dict[str, Any] = {
    "train_prefix": Path("t"),
    "held_out_prefix": Path("h"),
    "tokenizer_dir": Path("k"),
}
OLMO2_DATA = DataConfig(
    train="t", held_out="h", tokenizer="k", sequence_length=4096, held_out_sequences=1
)
OLMO2_SETTINGS: dict[str, Any] = {
    "precision": "bf16",
    "batch_size": 1024,
    "micro_batch_size": 1,
    "data": OLMO2_DATA,
}
P_7B = 7_298_617_344


def components(memory: RankMemory) -> dict[str, int]:
    return {part.name: part.bytes for part in memory.components}


def test_the_300b_ablation(tmp_path, capsys):
    """Four OLMo2-7B of 350e9 tokens of 47.768 GFLOP, at 40% of 989 TFLOP/s, 8,282 tokens/s."""
    cluster = make_cluster(8, 8, "h100")
    plans = []
    for peak_lr in (3e-4, 6e-4, 9e-4, 12e-4):
        changes: dict[str, Any] = {
            "total_steps": 83_447,
            "save_steps": (*range(4000, 83_447, 4000), 83_447),
        } | OLMO2_SETTINGS
        config = make_run(
            tmp_path / f"lr{peak_lr}", **PATHS, model=OLMO2_7B, peak_lr=peak_lr, **changes
        )
        plans.append(plan_run(config, cluster))
    print_plans(plans, cluster)
    text = capsys.readouterr().out
    assert "7,298,617,344 parameters, 47.8 GFLOP per token" in text
    assert "in sum: 46,958 GPU-hours, 30.57 days" in text  # 46,958 / 64 / 24
    assert "DOES NOT FIT" in text
    run = plans[0]
    assert run.parameters == P_7B
    assert run.checkpoints.each == 14 * P_7B  # bf16 weights, fp32 main weights, two moments
    assert run.checkpoints.trajectory == 21 * 14 * P_7B
    assert run.memory
    held = components(run.memory)
    assert held["weights"] == 2 * P_7B
    assert held["gradients, fp32"] == 4 * P_7B
    assert held["main weights, fp32"] == pytest.approx(4 * P_7B / 64, abs=4)
    assert held["Adam's moments, fp32"] == pytest.approx(8 * P_7B / 64, abs=8)
    assert run.memory.bytes > 80e9
    # 51 GB of state leave no room for 32 layers
    assert run.layouts[0].changes["recompute"] == "layers"
    assert run.layouts[0].words == "tensor 1, pipeline 1"
    assert all(layout.memory.bytes <= 80e9 for layout in run.layouts)


def test_disk_of_averages_and_a_branch(tmp_path):
    """At 47% of 989 TFLOP/s an OLMo2-7B sees 9,731 tokens/s; a branch has its own tokens only."""
    config = make_run(
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
    run = plan_run(config, make_cluster(1, 8, "h200"))
    assert run.tokens_per_second_per_gpu == pytest.approx(8282, abs=1)
    assert run.tokens == 11_921 * 4_194_304
    disk = run.checkpoints
    assert disk.each == (14 + 4 * 6) * P_7B  # five members of the window and one moving average
    assert disk.trajectory == (2 + 3) * disk.each + 2 * 2 * 2 * P_7B
    assert run.memory
    assert components(run.memory)["averages, fp32"] == 4 * 6 * P_7B // 8


def test_what_does_not_fit_and_what_would(tmp_path):
    """bf16 weights and fp32 gradients take 6 bytes a parameter in a replica, state 12 in all.

    13B: 82 GB, too much for one A100, so a replica has two of them at least. 32B on 8 H100s: 18
    bytes x 32.2e9 / 8 are 72.5 GB when all form one replica, and two replicas of four would take
    97 GB.
    """

    def layouts(name: str, model: ModelConfig, cluster: Cluster) -> list[Layout]:
        config = make_run(tmp_path / name, **PATHS, **OLMO2_SETTINGS, model=model)
        return plan_run(config, cluster).layouts

    def sizes(found: list[Layout]) -> list[int]:
        splits = [layout.changes["parallel"] for layout in found]
        return [split["tensor"] * split["pipeline"] for split in splits]

    on_a100 = sizes(layouts("13B", OLMO2_13B, make_cluster(4, 8, "a100")))
    assert on_a100[0] == 2
    assert on_a100 == sorted(on_a100)
    on_h100 = layouts("32B", OLMO2_32B, make_cluster(1, 8, "h100"))
    assert set(sizes(on_h100)) <= {8}
    assert all(layout.changes["recompute"] == "layers" for layout in on_h100)


def test_what_does_not_divide(tmp_path, capsys):
    """1,024 sequences do not divide over 24 replicas, and 32 heads not over tensor 3."""
    config = make_run(
        tmp_path / "zero",
        **PATHS,
        **OLMO2_SETTINGS,
        model=OLMO2_7B,
        engine="deepspeed",
        zero=ZeroConfig(stage=2),
    )
    cluster = make_cluster(3, 8, "h100")
    run = plan_run(config, cluster)
    assert run.memory is None
    assert "not a multiple of data-parallel size 24" in str(run.refusal)
    assert run.layouts == []
    print_plans([run], cluster)
    assert "no layout of 24 h100 fits" in capsys.readouterr().out


def test_refusals_of_the_command(tmp_path):
    make_run(tmp_path / "run", **PATHS)
    command = ["plan", str(tmp_path / "run"), "--gpus-per-node", "2", "--gpu"]
    for arguments, reason in (
        (["b200", "--nodes", "1"], "h100, h200, a100"),
        (["h100", "--nodes", "0"], "train nothing"),
    ):
        with pytest.raises(UserError, match=reason):
            CliRunner().invoke(app, [*command, *arguments], catch_exceptions=False)
    done = CliRunner().invoke(app, [*command, "h100", "--nodes", "1"])
    assert done.exit_code == 0
    assert "layouts that fit" in done.stdout
