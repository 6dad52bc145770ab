"""Learning rates against numbers worked by hand and against those Ai2 published, and the command that shows them."""

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from typer.testing import CliRunner

from tests.runs import error_line, make_run, python
from train.__main__ import app
from train.command import UserError
from train.schedules import learning_rate
from train.settings import (
    Anneal,
    BranchFrom,
    ConstantPhase,
    CosinePhase,
    DataConfig,
    LinearPhase,
    OptimizerConfig,
    ScheduleConfig,
)

STEP = 8 * 32  # tokens of one step
PATHS: dict[str, Any] = {"train_prefix": Path("train"), "held_out_prefix": Path("held"), "tokenizer_dir": Path("t")}
OLMO2_7B = {
    "batch_size": 1024,
    "data": DataConfig(train="train", held_out="held", tokenizer="t", sequence_length=4096, held_out_sequences=1),
}
OLMO2_WARMUP_TOKENS = 8_388_608_000  # 2,000 steps
PYTHIA_DATA = DataConfig(train="train", held_out="held", tokenizer="t", sequence_length=2048, held_out_sequences=1)


@pytest.fixture
def run(tmp_path):
    """Builds a run with the given schedule."""

    def build(schedule, total_steps, peak_lr=1.0, name="run", **changes):
        optimizer = OptimizerConfig(peak_lr=peak_lr)
        settings = {"total_steps": total_steps, "save_steps": (total_steps,)} | changes
        return make_run(tmp_path / name, **PATHS, schedule=schedule, optimizer=optimizer, **settings)

    return build


def rates(config):
    return [learning_rate(config, step) for step in range(config.total_steps + 1)]


def test_constant_after_warmup(run):
    config = run(ScheduleConfig(warmup_tokens=4 * STEP, phase=ConstantPhase()), 6)
    assert rates(config) == [0, 0.25, 0.5, 0.75, 1, 1, 1]


def test_no_warmup_starts_at_the_peak(run):
    config = run(ScheduleConfig(warmup_tokens=0, phase=ConstantPhase()), 3)
    assert learning_rate(config, 1) == 1


def test_cosine_reaches_its_floor_at_its_own_horizon(run):
    config = run(ScheduleConfig(warmup_tokens=0, phase=CosinePhase(horizon_tokens=4 * STEP, floor=0.2)), 6)
    half = 0.2 + 0.8 * (1 + 2**-0.5) / 2  # cos(45 degrees) = 1 / sqrt(2)
    expected = [1, half, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2, 0.2, 0.2, 0.2]
    assert rates(config) == pytest.approx(expected)


def test_linear_phase_after_warmup(run):
    phase = LinearPhase(horizon_tokens=6 * STEP, floor=0.2)
    assert rates(run(ScheduleConfig(warmup_tokens=2 * STEP, phase=phase), 7)) == pytest.approx(
        [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


@pytest.mark.parametrize(
    ("anneal", "expected"),
    [
        (Anneal(start_step=4), [0.75, 0.5, 0.25, 0]),
        (Anneal(start_step=4, floor=0.2), [0.8, 0.6, 0.4, 0.2]),
        (Anneal(start_step=4, shape="cosine"), [0.853553, 0.5, 0.146447, 0]),
        (Anneal(start_step=4, shape="sqrt"), [0.5, 0.292893, 0.133975, 0]),  # 1 - sqrt of 1/4, 2/4, 3/4, 1
        (Anneal(start_step=4, shape="sqrt", floor=0.5), [0.75, 0.646447, 0.566987, 0.5]),
    ],
)
def test_warmup_stable_decay(run, anneal, expected):
    config = run(ScheduleConfig(warmup_tokens=2 * STEP, phase=ConstantPhase(), anneal=anneal), 8)
    assert rates(config) == pytest.approx([0, 0.5, 1, 1, 1, *expected], abs=1e-6)


def test_an_anneal_starts_from_the_rate_the_cosine_had_reached(run):
    """Half way through the cosine the rate is 0.55; two steps of anneal take it to 0.275 and 0."""
    phase = CosinePhase(horizon_tokens=8 * STEP)
    config = run(ScheduleConfig(warmup_tokens=0, phase=phase, anneal=Anneal(start_step=4)), 6)
    assert [learning_rate(config, step) for step in (4, 5, 6)] == pytest.approx([0.55, 0.275, 0])


@pytest.mark.parametrize(
    ("peak_lr", "step", "published"),
    [
        (3e-4, 477_000, 2.0707e-4),  # allenai/OLMo, configs/annealing/peteish7-from-477000
        (6e-4, 477_000, 4.1414e-4),  # the same of the 6e-4 run
        (3e-4, 72_000, 2.9770e-4),  # where the 300B ablation starts to anneal
        (6e-4, 72_000, 5.9540e-4),
        (9e-4, 72_000, 8.9311e-4),
        (12e-4, 72_000, 1.19081e-3),
        (3e-4, 928_646, 6.1351e-5),  # where OLMo2-7B stopped; the files round it in two other ways
        (3e-4, 1, 1.5e-7),  # the first update already moves: peak / 2000
        (3e-4, 2_000, 3e-4),
        (3e-4, 1_192_093, 3e-5),  # 5e12 tokens
    ],
)
def test_olmo2_7b(run, peak_lr, step, published):
    """5e12 tokens of 4,194,304 a step are 1,192,093 steps; the published figures have five digits."""
    phase = CosinePhase(horizon_tokens=5_000_000_000_000)
    config = run(
        ScheduleConfig(warmup_tokens=OLMO2_WARMUP_TOKENS, phase=phase),
        step if step > 2000 else 2000,
        peak_lr,
        **OLMO2_7B,
    )
    assert learning_rate(config, step) == pytest.approx(published, rel=2e-5)


@pytest.mark.parametrize(
    ("horizon_tokens", "share", "rel"), [(5_000_000_000_000, 0.99234, 5e-6), (300_000_000_000, 0.1, 1e-12)]
)
@pytest.mark.parametrize("length", [11_921, 23_842])  # 50B and 100B tokens
@pytest.mark.parametrize("peak_lr", [3e-4, 6e-4, 9e-4, 12e-4])
def test_anneals_of_the_300b_ablation(run, peak_lr, length, horizon_tokens, share, rel):
    """From LR(72000) straight to zero: nearly the peak with Ai2's horizon, its tenth with one of 300B tokens."""
    phase = CosinePhase(horizon_tokens=horizon_tokens)
    schedule = ScheduleConfig(warmup_tokens=OLMO2_WARMUP_TOKENS, phase=phase, anneal=Anneal(start_step=72_000))
    config = run(schedule, 72_000 + length, peak_lr, **OLMO2_7B)
    start = learning_rate(config, 72_000)
    assert start == pytest.approx(share * peak_lr, rel=rel)
    assert learning_rate(config, 72_001) == pytest.approx(start * (length - 1) / length)
    assert learning_rate(config, 72_000 + 11_921) == pytest.approx(0 if length == 11_921 else start / 2)
    assert learning_rate(config, 72_000 + length) == 0


def test_pythia_cooldown(run):
    """The paper's WSD: 190,000 steps of 524,288 tokens, 1% warm-up to 3e-3, the last 19,000 straight to zero."""
    schedule = ScheduleConfig(warmup_tokens=1900 * 524_288, phase=ConstantPhase(), anneal=Anneal(start_step=171_000))
    config = run(schedule, 190_000, 3e-3, batch_size=256, data=PYTHIA_DATA)
    found = [learning_rate(config, step) for step in (950, 1900, 171_000, 173_500, 180_500, 190_000)]
    assert found == pytest.approx([1.5e-3, 3e-3, 3e-3, 2.605263e-3, 1.5e-3, 0], rel=1e-6)


def test_pythia_as_released(run):
    """143,000 steps of 2,097,152 tokens, warm-up of 1,430, cosine to a tenth: 0.55 of the peak half way."""
    phase = CosinePhase(horizon_tokens=143_000 * 2_097_152)
    config = run(
        ScheduleConfig(warmup_tokens=1430 * 2_097_152, phase=phase), 143_000, 6e-4, batch_size=1024, data=PYTHIA_DATA
    )
    found = [learning_rate(config, step) for step in (1430, 72_215, 143_000)]
    assert found == pytest.approx([6e-4, 3.3e-4, 6e-5])


def test_table_and_picture(run, tmp_path):
    """The rows that matter stand in the table; two runs and the branch of one are drawn, in three colours."""
    wsd = ScheduleConfig(warmup_tokens=2 * STEP, phase=ConstantPhase(), anneal=Anneal(start_step=12))
    run(wsd, 16, 3e-3, name="wsd", save_steps=(0, 8, 16))
    cosine = ScheduleConfig(warmup_tokens=2 * STEP, phase=CosinePhase(horizon_tokens=10 * STEP))
    run(cosine, 16, 2e-3, name="cosine")
    early = wsd.model_copy(update={"anneal": Anneal(start_step=8, shape="sqrt")})
    run(early, 12, 3e-3, name="early", branch_from=BranchFrom(run="../wsd", step=8, fingerprint="0" * 16))
    picture = tmp_path / "schedules.png"
    arguments = [*(str(tmp_path / name) for name in ("wsd", "cosine", "early")), "--out", str(picture)]
    done = CliRunner().invoke(app, ["schedule", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["8", "2,048", "constant", "3.0000e-03", "saved"] in rows  # of wsd
    assert ["12", "3,072", "constant", "3.0000e-03"] in rows
    assert ["16", "4,096", "linear", "anneal", "0.0000e+00", "saved"] in rows
    assert ["10", "2,560", "cosine", "floor", "2.0000e-04"] in rows
    branch = rows[next(index for index, row in enumerate(rows) if row[:1] == ["early:"]) :]
    steps = [int(row[0]) for row in branch if row and row[0].isdigit()]
    assert steps[0] == 8
    assert steps[-1] == 12
    assert ["10", "2,560", "sqrt", "anneal", f"{3e-3 * (1 - math.sqrt(0.5)):.4e}"] in branch
    pixels = matplotlib.image.imread(picture)[..., :3].reshape(-1, 3)
    for colour in ("#0072b2", "#d55e00", "#009e73"):
        rgb = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        assert (abs(pixels - rgb).max(1) < 0.01).sum() > 500


def test_refusals(run, tmp_path):
    run(ScheduleConfig(warmup_tokens=0, phase=ConstantPhase()), 3)
    assert "run.json" in error_line(python("train", "schedule", str(tmp_path / "absent")))
    with pytest.raises(UserError, match="png"):
        CliRunner().invoke(app, ["schedule", str(tmp_path / "run"), "--out", "x.pdf"], catch_exceptions=False)
