"""Comparing runs: against differences planted by hand, and against two real runs of different layouts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.runs import error_line, make_run, python
from train.__main__ import app
from train.command import UserError
from train.settings import BranchFrom

PATHS: dict[str, Any] = {"train_prefix": Path("train"), "held_out_prefix": Path("held"), "tokenizer_dir": Path("t")}


def compare(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)


def losses_of(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def write_run(directory: Path, steps: range, planted: dict[int, dict[str, float]] | None = None, **changes) -> Path:
    """A run whose figures are 3, 2, 1e-3 and, at every fifth step, 3.5, but for those planted."""
    make_run(directory, **PATHS, **changes)
    rows = []
    for step in steps:
        row = {"step": step, "tokens": step * 256, "attempt": 1, "loss": 3.0, "grad_norm": 2.0, "learning_rate": 1e-3}
        row |= {"held_out_loss": 3.5} if step % 5 == 0 else {}
        rows.append(row | (planted or {}).get(step, {}))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def sections(output: str) -> dict[str, list[str]]:
    """The lines of each figure, spaces squeezed, by its name."""
    blocks = [[" ".join(line.split()) for line in block.splitlines()] for block in output.split("\n\n")[1:]]
    return {block[0].split()[0].rstrip(":"): block for block in blocks}


def test_planted_differences(tmp_path):
    """Losses part at step 3 by 5e-7, pass 1e-4 at step 8 and are furthest apart, by 5e-3, at step 12 of 20."""
    a = write_run(tmp_path / "a", range(1, 21))
    planted = {3: {"loss": 3.0 + 5e-7}, 8: {"loss": 3.0 - 2e-4}, 12: {"loss": 3.005}, 17: {"grad_norm": 2.5}}
    b = write_run(tmp_path / "b", range(1, 23), planted, peak_lr=3e-2, engine="deepspeed")
    done = compare(a, b, "--tolerance", "3e-3")
    assert done.exit_code == 1
    found = sections(done.stdout)
    assert found["loss"] == [
        "loss (nats per token), 20 steps",
        "first difference step 3 5.000e-07",
        "first beyond 1e-06 step 8 2.000e-04",
        "first beyond 0.0001 step 8 2.000e-04",
        "first beyond 0.003 step 12 5.000e-03",
        "first beyond 0.01 never",
        "largest step 12 5.000e-03",
    ]
    assert found["grad_norm"][-1] == "largest step 17 2.000e-01"  # 0.5 of 2.5
    assert found["learning_rate"] == ["learning_rate: identical over 20 steps"]
    assert found["held_out_loss"] == ["held_out_loss: identical over 4 steps"]
    head = [" ".join(line.split()) for line in done.stdout.split("\n\n")[0].splitlines()]
    assert head == [
        "settings that differ:",
        'name "a" | "b"',
        'engine "megatron" | "deepspeed"',
        "optimizer.peak_lr 0.01 | 0.03",
        "20 steps in both, 2 only in B (from 21 to 22)",
    ]
    assert compare(a, b).exit_code == 0
    assert compare(a, b, "--tolerance", "0.2").exit_code == 0


def test_a_branch_against_its_parent(tmp_path):
    parent = write_run(tmp_path / "parent", range(1, 21))
    origin = BranchFrom(run="../parent", step=12, fingerprint="0" * 16)
    child = write_run(tmp_path / "child", range(13, 19), {15: {"loss": 2.0}}, branch_from=origin, save_steps=(20,))
    done = compare(parent, child)
    assert done.exit_code == 0
    assert "6 steps in both, 14 only in A (from 1 to 20)" in done.stdout
    assert "branch_from.step" in done.stdout
    assert sections(done.stdout)["loss"][1] == "first difference step 15 1.000e+00"


def test_real_runs(trained, tmp_path):
    """A run equals its copy at all steps; fp32 and bf16 part where their logged losses first do."""
    fp32, bf16 = trained("dp1"), trained("bf16-dp2")
    copy = shutil.copytree(fp32, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    done = compare(fp32, copy, "--tolerance", "0")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "the same settings"
    assert "loss: identical over 20 steps" in done.stdout
    a, b = losses_of(fp32), losses_of(bf16)
    distances = {step: abs(a[step] - b[step]) for step in a}
    furthest = max(distances, key=lambda step: distances[step])
    done = compare(fp32, bf16)
    assert 'precision "fp32" | "bf16"' in " ".join(done.stdout.split())
    found = sections(done.stdout)
    assert found["loss"][-1] == f"largest step {furthest} {distances[furthest]:.3e}"
    assert found["learning_rate"] == ["learning_rate: identical over 20 steps"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "holds no metrics"),
        ("", "holds no metrics"),
        ("nonsense\n", "no row of metrics"),
        ('{"step": 1, "loss": NaN}\n', "no finite number"),
        ('{"step": 1, "loss": "3.0"}\n', "no finite number"),
        ('{"step": "1", "loss": 3.0}\n', "no whole number"),
        ('{"step": 99, "loss": 3.0}\n', "no step in common"),
        (b"\xff\xfe\x00", "not text"),
    ],
)
def test_damaged_input(tmp_path, content, reason):
    a = write_run(tmp_path / "a", range(1, 4))
    b = write_run(tmp_path / "b", range(1, 4))
    metrics = b / "metrics.jsonl"
    metrics.unlink()
    if content is not None:
        metrics.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=reason) as raised:
        compare(a, b)
    assert str(b) in str(raised.value)


def test_refusals(tmp_path):
    a = write_run(tmp_path / "a", range(1, 4))
    assert "run.json" in error_line(python("train", "compare", str(a), str(tmp_path / "absent")))
    with pytest.raises(UserError, match="--tolerance"):
        compare(a, a, "--tolerance", "nan")
