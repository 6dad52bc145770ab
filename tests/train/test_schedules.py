"""Learning rates against numbers worked by hand and against those Ai2 published."""

import pytest

from tests.runs import make_run
from train.config import load_run
from train.schedules import learning_rate
from train.settings import Anneal, ConstantPhase, CosinePhase, DataConfig, OptimizerConfig, ScheduleConfig

STEP = 8 * 32  # tokens of one step
OLMO2_7B = {
    "batch_size": 1024,
    "data": DataConfig(train="train", held_out="held", tokenizer="t", sequence_length=4096, held_out_sequences=1),
}


@pytest.fixture
def run(tmp_path, inputs):
    """Builds a run with the given schedule."""

    def build(schedule, total_steps, peak_lr=1.0, **changes):
        make_run(
            tmp_path / "run",
            **inputs,
            **changes,
            schedule=schedule,
            optimizer=OptimizerConfig(peak_lr=peak_lr),
            total_steps=total_steps,
            save_steps=(total_steps,),
        )
        return load_run(tmp_path / "run" / "run.json")

    return build


def test_constant_after_warmup(run):
    config = run(ScheduleConfig(warmup_tokens=4 * STEP, phase=ConstantPhase()), 6)
    assert [learning_rate(config, step) for step in range(7)] == [0, 0.25, 0.5, 0.75, 1, 1, 1]


def test_warmup_stable_decay(run):
    config = run(ScheduleConfig(warmup_tokens=2 * STEP, phase=ConstantPhase(), anneal=Anneal(start_step=4)), 8)
    assert [learning_rate(config, step) for step in range(9)] == [0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0]


def test_no_warmup_starts_at_the_peak(run):
    config = run(ScheduleConfig(warmup_tokens=0, phase=ConstantPhase()), 3)
    assert learning_rate(config, 1) == 1


def test_cosine_reaches_its_floor_at_its_own_horizon(run):
    config = run(ScheduleConfig(warmup_tokens=0, phase=CosinePhase(horizon_tokens=4 * STEP, floor=0.2)), 6)
    half = 0.2 + 0.8 * (1 + 2**-0.5) / 2  # cos(45 degrees) = 1 / sqrt(2)
    expected = [1, half, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2, 0.2, 0.2, 0.2]
    assert [learning_rate(config, step) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("peak_lr", "step", "published"),
    [
        (3e-4, 477_000, 2.0707e-4),  # allenai/OLMo, configs/annealing/peteish7-from-477000
        (6e-4, 477_000, 4.1414e-4),  # the same of the 6e-4 run
        (3e-4, 72_000, 2.9770e-4),  # where the 300B ablation starts to anneal
        (12e-4, 72_000, 1.19081e-3),
        (3e-4, 1, 1.5e-7),  # the first update already moves: peak / 2000
    ],
)
def test_olmo2_7b(run, peak_lr, step, published):
    """5e12 tokens of 4,194,304 a step are 1,192,093 steps; the published figures have five digits."""
    phase = CosinePhase(horizon_tokens=5_000_000_000_000)
    config = run(ScheduleConfig(warmup_tokens=8_388_608_000, phase=phase), 500_000, peak_lr, **OLMO2_7B)
    assert learning_rate(config, step) == pytest.approx(published, rel=2e-5)


def test_anneal_of_the_300b_ablation(run):
    """50B tokens are 11,921 steps: half way at half the rate of its start, zero at step 83,921."""
    phase = CosinePhase(horizon_tokens=5_000_000_000_000)
    schedule = ScheduleConfig(warmup_tokens=8_388_608_000, phase=phase, anneal=Anneal(start_step=72_000))
    config = run(schedule, 83_921, 3e-4, **OLMO2_7B)
    start = learning_rate(config, 72_000)
    assert learning_rate(config, 72_000 + 1) == pytest.approx(start * 11_920 / 11_921)
    assert learning_rate(config, 83_921) == 0
