"""The plan against sums worked by hand."""

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from base.aligned import WIDTH
from tests.runs import make_run
from train.__main__ import app
from train.model.config import ModelConfig
from train.model.presets import OLMO2_1B, OLMO2_7B, OLMO2_13B, OLMO2_32B, OLMO2_190M
from train.planning.flops import GPUS
from train.planning.memory import checkpoint_bytes, parameter_count, rank_memory, snapshot_bytes
from train.planning.plan import Layout, fit, fitting_layouts, in_words
from train.planning.report import PlannedGpus, plan_lines
from train.run.config import BranchFrom
from train.run.optimization import Ema, Lawa
from train.run.parallel import ZeroConfig
from train.run.saving import SavingConfig

OLMO2_SETTINGS: dict[str, Any] = {
    "precision": "bf16",
    "batch_size": 1024,
    "micro_batch_size": 1,
    "data": {"sequence_length": 4096},
}
P_7B = 7_298_617_344


def test_the_300b_ablation(tmp_path):
    """Four OLMo2-7B of 350e9 tokens of 47.768 GFLOP."""
    configs = []
    for peak_lr in (3e-4, 6e-4, 9e-4, 12e-4):
        changes: dict[str, Any] = {
            "total_steps": 83_447,
            "save_steps": (*range(4000, 83_447, 4000), 83_447),
            **OLMO2_SETTINGS,
            "micro_batch_size": 4,
        }
        directory = tmp_path / f"lr{peak_lr}"
        configs.append(make_run(directory, model=OLMO2_7B, peak_lr=peak_lr, **changes))
    short = plan_lines(configs, PlannedGpus(8, 8, "h100"))
    assert short[0] == "all 4 runs fit on 8 x 8 h100"
    assert len(short) <= 24
    assert max(map(len, short)) <= WIDTH
    text = "\n".join(plan_lines(configs, PlannedGpus(8, 8, "h100"), whole=True))
    assert text.startswith("\n".join(short[:-1]))
    assert "7,298,617,344 parameters, 47.8 GFLOP per token" in text
    figures = re.search(r"at ([\d,]+) tokens/s/GPU, MFU (\d+)% \(\d+% to \d+%\)", text)
    total = re.search(r"^([\d,]+) \([\d,]+ to [\d,]+\) GPU-hours, ([\d.]+) days one", short[1])
    assert figures
    assert total
    speed, mfu = (float(figure.replace(",", "")) for figure in figures.groups())
    assert speed * 47.768e9 / 989e12 == pytest.approx(mfu / 100, abs=0.006)
    hours, days = (float(figure.replace(",", "")) for figure in total.groups())
    assert hours == pytest.approx(4 * 83_447 * 2**22 / speed / 3600, rel=0.003)
    assert days == pytest.approx(hours / 64 / 24, rel=0.005)
    # As its run.json has it, with 4 sequences of a microbatch; it gets fewer.
    assert "DOES NOT FIT" in text
    assert short[4].split()[-7:] == [
        "2",
        "tensor",
        "1,",
        "pipeline",
        "1,",
        "recompute",
        "selective",
    ]
    assert parameter_count(configs[0]) == P_7B
    disk = checkpoint_bytes(configs[0])
    assert disk.full_each == 14 * P_7B  # bf16 weights, fp32 main weights, two moments
    assert disk.kept == 21 * 14 * P_7B
    assert disk.rotated == 0
    memory = rank_memory(configs[0], 64)
    components = memory.components
    assert components["weights"] == 2 * P_7B
    assert components["gradients, fp32"] == 4 * P_7B
    assert components["main weights, fp32"] == pytest.approx(4 * P_7B / 64, abs=4)
    assert components["optimizer states, fp32"] == pytest.approx(8 * P_7B / 64, abs=8)
    assert memory.bytes > 80e9
    # 49 GB of state leave room for 32 layers of one sequence: 19 GB, of which SwiGLU's output 2.9,
    # queries and keys 2.1 and the MLP's input 1.1 can be recomputed, and then of two.
    layouts = fitting_layouts(configs[0], 64, gpus_per_node=8, gpu=GPUS["h100"])
    micro = {
        layout.run.recompute: layout.run.micro_batch_size
        for layout in layouts
        if in_words(layout.run) == "tensor 1, pipeline 1"
    }
    assert (micro["none"], micro["selective"]) == (1, 2)
    assert all(layout.memory.bytes <= 80e9 for layout in layouts)
    on_h200 = fitting_layouts(configs[0], 64, gpus_per_node=8, gpu=GPUS["h200"])
    assert in_words(on_h200[0].run) == "tensor 1, pipeline 1"
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("tensor 1, pipeline 1 1 none 71.1 GB 6") for row in rows)
    shown = [float(row[:-1].rsplit(" ", 1)[1]) for row in rows if row.endswith("%")]
    assert shown[:8] == sorted(shown[:8], reverse=True)


def test_disk_of_averages_and_a_branch(tmp_path):
    """A branch has its own tokens only."""
    config = make_run(
        tmp_path / "branch",
        **OLMO2_SETTINGS,
        model=OLMO2_7B,
        averages=(Lawa(interval_steps=500, window=5), Ema(decay=0.999)),
        branch_from=BranchFrom(run="../lr3e-4", step=72_000, fingerprint="0" * 16),
        saving=SavingConfig(restart_every_steps=1000, restart_keep=3),
        total_steps=83_921,
        save_steps=(80_000, 83_921),
    )
    text = "\n".join(plan_lines([config], PlannedGpus(1, 8, "h200"), whole=True))
    assert f"{11_921 * 4_194_304:,} tokens at " in text
    disk = checkpoint_bytes(config)
    assert disk.full_each == (14 + 4 * 6) * P_7B  # five of the window and one moving average
    assert disk.kept == 2 * disk.full_each + 2 * 2 * 2 * P_7B
    assert disk.rotated == 4 * disk.full_each  # three, and the one being written
    full_steps: dict[str, Any] = {"full_steps": (), "average_steps": (83_921,)}
    lean = config.saving.model_copy(update=full_steps)
    disk = checkpoint_bytes(config.model_copy(update={"saving": lean}))
    assert disk.kept == (2 + 2) * 2 * P_7B  # two permanent ones, and both averages at the end
    assert rank_memory(config, 8).components["averages, fp32"] == 4 * 6 * P_7B // 8
    # the state, with weights of the checkpoint and of two averages
    assert snapshot_bytes(config, 8) == (12 + 4 * 6 + 3 * 2) * P_7B // 8


def test_what_does_not_fit_and_what_would(tmp_path):
    """bf16 weights and fp32 gradients take 6 bytes a parameter in a replica, state 12 in all.

    13B: 82 GB, too much for one A100, so a replica has two of them at least. 32B on 8 H100s: 18
    bytes x 32.2e9 / 8 are 72.5 GB when all form one replica, and two replicas of four would take
    97 GB.
    """

    def layouts(name: str, model: ModelConfig, gpus: int, gpu: str) -> list[Layout]:
        config = make_run(tmp_path / name, **OLMO2_SETTINGS, model=model)
        return fitting_layouts(config, gpus, gpus_per_node=8, gpu=GPUS[gpu])

    def sizes(choices: list[Layout]) -> list[int]:
        splits = [layout.run.parallel for layout in choices]
        return [split.tensor * split.pipeline for split in splits]

    on_a100 = sizes(layouts("13B", OLMO2_13B, 32, "a100"))
    assert min(on_a100) == 2
    on_h100 = layouts("32B", OLMO2_32B, 8, "h100")
    assert set(sizes(on_h100)) <= {8}
    assert all(layout.run.recompute == "layers" for layout in on_h100)


@pytest.mark.parametrize(
    ("model", "most", "micro", "recompute"),
    [
        # 1.7 GB a sequence: all of the 16 fit, and the fewest kernels are the fastest.
        (OLMO2_190M, 16, 16, "none"),
        (OLMO2_190M, 4, 4, "none"),  # as it was set
        # 56.4 GB of state and averages, 5.9 a sequence, of which 2.0 can be computed again: four
        # fit without these, two with them. Products add gradients up, so two are faster; a 7B on
        # 64 GPUs is not, as above.
        (OLMO2_1B, 16, 2, "none"),
    ],
)
def test_a_micro_batch_is_the_fastest_that_fits(tmp_path, model, most, micro, recompute):
    averages = (Lawa(interval_steps=5, window=5),)
    settings = OLMO2_SETTINGS | {"micro_batch_size": most, "averages": averages}
    config = make_run(tmp_path / "run", **settings, model=model)
    fitted = fit(config, 1, gpus_per_node=1, gpu=GPUS["h100"])
    assert fitted
    assert (fitted.micro_batch_size, fitted.recompute) == (micro, recompute)


def test_what_does_not_divide(tmp_path):
    """1,024 sequences do not divide over 24 replicas, and 32 heads not over tensor 3."""
    config = make_run(
        tmp_path / "zero",
        **OLMO2_SETTINGS,
        model=OLMO2_7B,
        engine="deepspeed",
        zero=ZeroConfig(stage=2),
    )
    text = "\n".join(plan_lines([config], PlannedGpus(3, 8, "h100"), whole=True))
    assert "not a multiple of data-parallel size 24" in text
    assert "no layout of 24 h100 fits" in text

    assert plan_lines([config, config], PlannedGpus(3, 8, "h100"))[0] == (
        "2 of 2 runs fit no layout on 3 x 8 h100; give more GPUs or larger ones"
    )


def test_refusals_of_the_command(tmp_path):
    make_run(tmp_path / "run")
    command = ["plan", str(tmp_path / "run"), "--gpus-per-node", "2", "--gpu"]
    for arguments, reason in (
        (["b200", "--nodes", "1"], "Invalid value for '--gpu'"),
        (["h100", "--nodes", "0"], "Invalid value for '--nodes'"),
    ):
        refused = CliRunner().invoke(app, [*command, *arguments])
        assert refused.exit_code == 2
        assert reason in refused.output
    done = CliRunner().invoke(app, [*command, "h100", "--nodes", "1"])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].endswith(" fits on 1 x 2 h100")
