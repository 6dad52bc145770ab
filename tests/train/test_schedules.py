"""Learning rates against numbers worked by hand and against those Ai2 published."""

import re
from typing import Any

import pytest

from tests.runs import make_run
from train.run.optimization import (
    Anneal,
    ConstantPhase,
    CosinePhase,
    Phase,
    ScheduleConfig,
    SmallerBatch,
)
from train.run.schedules import learning_rate

STEP = 8 * 32  # tokens of one step
OLMO2_7B: dict[str, Any] = {"batch_size": 1024, "data": {"sequence_length": 4096}}
OLMO2_WARMUP_TOKENS = 8_388_608_000  # 2,000 steps


@pytest.fixture
def run(tmp_path):
    """Builds a run with the given schedule."""

    def build(schedule, total_steps, peak_lr=1.0, **changes):
        steps = {"total_steps": total_steps, "save_steps": (total_steps,)}
        return make_run(tmp_path / "run", schedule=schedule, peak_lr=peak_lr, **(steps | changes))

    return build


def rates(config):
    return [learning_rate(config, step) for step in range(config.total_steps + 1)]


COSINE = CosinePhase(horizon_tokens=4 * STEP, floor=0.2)
HALF = 2**-0.5  # cos(45 degrees)


@pytest.mark.parametrize(
    ("warmup_steps", "phase", "anneal", "expected"),
    [
        (4, ConstantPhase(), None, [0, 0.25, 0.5, 0.75, 1, 1, 1]),
        (0, ConstantPhase(), None, [1, 1, 1, 1]),
        # to the floor at its own horizon
        (0, COSINE, None, [1, 0.6 + 0.4 * HALF, 0.6, 0.6 - 0.4 * HALF, 0.2, 0.2, 0.2]),
        (2, ConstantPhase(), Anneal(start_step=4), [0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (
            *(2, ConstantPhase(), Anneal(start_step=4, floor=0.2)),
            [0, 0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        (
            *(2, ConstantPhase(), Anneal(start_step=4, shape="cosine")),
            [0, 0.5, 1, 1, 1, 0.853553, 0.5, 0.146447, 0],
        ),
        (  # 1 - sqrt of 1/4, 2/4, 3/4, 1
            *(2, ConstantPhase(), Anneal(start_step=4, shape="sqrt")),
            [0, 0.5, 1, 1, 1, 0.5, 0.292893, 0.133975, 0],
        ),
        (
            *(2, ConstantPhase(), Anneal(start_step=4, shape="sqrt", floor=0.5)),
            [0, 0.5, 1, 1, 1, 0.75, 0.646447, 0.566987, 0.5],
        ),
        # half way through the cosine the rate is 0.55: two steps of anneal take it to 0.275 and 0
        (
            *(0, CosinePhase(horizon_tokens=8 * STEP), Anneal(start_step=4)),
            [1, 0.965746, 0.868198, 0.722208, 0.55, 0.275, 0],
        ),
    ],
)
def test_rates_worked_by_hand(run, warmup_steps, phase, anneal, expected):
    schedule = ScheduleConfig(warmup_tokens=warmup_steps * STEP, phase=phase, anneal=anneal)
    assert rates(run(schedule, len(expected) - 1)) == pytest.approx(expected, abs=1e-6)


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
    """5e12 tokens of 4,194,304 a step are 1,192,093 steps; published with five digits."""
    phase = CosinePhase(horizon_tokens=5_000_000_000_000)
    config = run(
        ScheduleConfig(warmup_tokens=OLMO2_WARMUP_TOKENS, phase=phase),
        max(step, 2000),
        peak_lr,
        **OLMO2_7B,
    )
    assert learning_rate(config, step) == pytest.approx(published, rel=2e-5)


def test_smaller_batches_first_are_counted_in_tokens(run):
    """Four updates of 2 sequences, two of 4, then 8: 8 x 32 tokens are the first four together."""
    stages = [{"until_step": 4, "batch_size": 2}, {"until_step": 6, "batch_size": 4}]
    config = run(
        ScheduleConfig(warmup_tokens=2 * STEP, phase=ConstantPhase(), anneal=Anneal(start_step=8)),
        10,
        batch_warmup=tuple(map(SmallerBatch.model_validate, stages)),
        micro_batch_size=2,
    )
    sizes = [config.batch_size_at(step) for step in range(1, 11)]
    assert sizes == [2, 2, 2, 2, 4, 4, 8, 8, 8, 8]
    assert [config.tokens_at(step) / 32 for step in (0, 1, 4, 5, 10)] == [0, 2, 8, 12, 48]
    assert config.total_tokens == 48 * 32
    assert config.warmup_steps == 6
    rising = [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 6 / 8, 1]
    assert rates(config) == pytest.approx([*rising, 1, 1, 0.5, 0])


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("phase", [ConstantPhase(), CosinePhase(horizon_tokens=99 * STEP)])
def test_words_have_the_rates_that_are_trained(run, phase, shape, floor):
    """Read the last rate, and where it begins to fall to it, off the words."""
    anneal = Anneal(start_step=20, shape=shape, floor=floor)
    schedule = ScheduleConfig(warmup_tokens=4 * STEP, phase=phase, anneal=anneal)
    config = run(schedule, 40)
    described = schedule.describe(config.warmup_steps)
    words = re.search(r"(\w+) anneal from step (\d+) to (\S+)", described)
    assert words
    assert words[1] == shape
    start, last = learning_rate(config, int(words[2])), learning_rate(config, 40)
    share = 0 if words[3] == "zero" else float(words[3].removesuffix("%")) / 100
    assert last == pytest.approx(share * start)
    assert learning_rate(config, int(words[2]) + 1) < start
    assert described.startswith("warm-up to step 4, ")
    assert learning_rate(config, 4) == 1


@pytest.mark.parametrize(
    ("phase", "anneal", "name", "words"),
    [
        (ConstantPhase(), None, "constant rate", "constant rate"),
        (ConstantPhase(), Anneal(start_step=8), "WSD", "linear anneal from step 8 to zero"),
        (
            CosinePhase(horizon_tokens=10 * STEP),
            None,
            "cosine",
            "cosine to 10% of the peak at 2,560 tokens",
        ),
        (CosinePhase(horizon_tokens=10 * STEP, floor=0), None, "cosine", "cosine to zero at 2,560"),
    ],
)
def test_schedules_in_words(phase, anneal, name, words):
    schedule = ScheduleConfig(warmup_tokens=0, phase=phase, anneal=anneal)
    assert schedule.name == name
    assert words in schedule.describe(0)
    assert "warm-up" not in schedule.describe(0)


def test_a_phase_of_another_kind_is_not_trained_as_one_of_these():
    """A class that says no rate of its own has none."""

    class Stairs(Phase):
        DECAYS = True

    with pytest.raises(TypeError, match="abstract methods 'describe', 'rate', 'title'"):
        Stairs()  # type: ignore[abstract]
