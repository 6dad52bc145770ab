"""Node-hours lost to restarts, and the interval of saves that loses least: by simulated failures,
closed forms, and a slow count of every row.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from scipy.special import lambertw
from scipy.stats import poisson

from study.recipes.resolve import resolve
from study.restarts import best_interval, between_failures, losses_of, lost_to_restarts
from tests.present import present
from tests.sealing import json_lines
from train.run.directory import RunDirectory
from train.run.history import history, surviving

HOUR = 3600.0
(RUN, OTHER, *_) = resolve("tiny", "smoke").trained


def test_without_many_failures_it_is_youngs_and_else_near_the_exact_one():
    """The exact mean time is M exp(R/M) (exp((t+C)/M) - 1) / t per second of training (Daly 2006,
    equation 20); its least value is where (t/M - 1) exp(t/M) = -exp(-C/M), a Lambert function.
    """
    for save, between in ((1e-6, 1e6), (1e-3, 1e8)):
        assert best_interval(save, between) == pytest.approx(
            math.sqrt(2 * save * between), rel=1e-5
        )
    for ratio in (1e-5, 1e-3, 0.01, 0.1, 0.3):
        exact = 1000.0 * (1 + lambertw(-math.exp(-ratio - 1)).real)
        # the next term of Daly's series is of order (C / 2M)^1.5
        bound = (ratio / 2) ** 1.5 + 1e-6
        assert best_interval(1000.0 * ratio, 1000.0) == pytest.approx(exact, rel=bound)
    assert best_interval(50.0, 20.0) == 20.0


def test_intervals_of_the_mean_time_are_where_poisson_leaves_a_fortieth():
    for failures in (1, 2, 5, 40):
        mean, low, high = between_failures(failures, 7000.0)
        assert low < mean == 7000.0 / failures < high
        assert poisson.cdf(failures, 7000.0 / low) == pytest.approx(0.025, rel=1e-6)
        assert poisson.sf(failures - 1, 7000.0 / high) == pytest.approx(0.025, rel=1e-6)


def simulated(
    rng: random.Random, interval: float, save: float, between: float, restart: float, segments: int
) -> list[float]:
    """Seconds that each segment of a run takes: an interval of training and its save, begun again
    after every failure, which comes at any moment of training, saves and restarts.
    """
    seconds = []
    until_failure = rng.expovariate(1 / between)
    for _ in range(segments):
        spent, left = 0.0, interval + save
        while left:
            if until_failure > left:
                until_failure -= left
                spent += left
                left = 0.0
                continue
            spent += until_failure
            until_failure = rng.expovariate(1 / between)
            left = restart + interval + save
        seconds.append(spent)
    return seconds


def cost(seconds: Sequence[float], interval: float) -> tuple[float, float]:
    """Seconds for a second of training, and the standard error."""
    mean = math.fsum(seconds) / len(seconds)
    variance = math.fsum((each - mean) ** 2 for each in seconds) / (len(seconds) - 1)
    return mean / interval, math.sqrt(variance / len(seconds)) / interval


def test_a_run_with_failures_costs_most_away_from_the_interval():
    rng, best = random.Random(3), best_interval(5.0, 1000.0)
    costs = {}
    for factor in (1 / 3, 1.0, 3.0):
        interval = factor * best
        segments = round(4e6 / interval)
        costs[factor] = cost(simulated(rng, interval, 5.0, 1000.0, 60.0, segments), interval)
    (value, error) = costs.pop(1.0)
    for other, other_error in costs.values():
        assert other - value > 4 * math.hypot(error, other_error)


@pytest.mark.stress
@pytest.mark.parametrize(("save", "between", "restart"), [(5.0, 1000.0, 60.0), (30.0, 900.0, 10.0)])
def test_the_least_cost_of_simulated_runs_is_at_the_interval(save, between, restart):
    """The least of a parabola in the logarithm through many simulated runs."""
    import numpy as np

    rng, best = random.Random(5), best_interval(save, between)
    factors = np.exp(np.linspace(-0.6, 0.6, 13))
    costs = []
    for factor in factors:
        interval = float(factor) * best
        runs = simulated(rng, interval, save, between, restart, round(1e8 / interval))
        costs.append(cost(runs, interval)[0])
    # of third degree, since the cost rises faster towards long intervals
    third, second, first, _ = np.polyfit(np.log(factors), costs, 3)
    least = (-second + math.sqrt(second**2 - 3 * third * first)) / (3 * third)
    print(f"C {save} M {between}: least at {math.exp(least):.3f} of {best:.1f} s")
    assert math.exp(least) == pytest.approx(1.0, abs=0.06)


def write_run(directory: RunDirectory, attempts: list[dict], rows: list[dict]) -> None:
    """Writes environment.json and metrics.jsonl."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.environment_json.write_text(json.dumps({"attempts": attempts}))
    directory.metrics.write_text(json_lines(rows))


def attempt_on(nodes: int, began: float) -> dict:
    """An entry of environment.json."""
    hosts = [f"node{number}" for number in range(nodes)]
    return {"host": "node0", "began": began, "nodes": [{"hosts": hosts, "gpus": ["NVIDIA H200"]}]}


def updates(attempt: int, steps: range, first_time: float, pace: float) -> Iterator[dict]:
    """Rows of updates, with one of a save, of 4 s, after every tenth."""
    for step in steps:
        row: dict[str, float] = {"step": step, "tokens": step, "attempt": attempt}
        row["time"] = first_time + pace * (step - steps[0])
        yield row | {"learning_rate": 1e-3, "loss": 5.0}
        if step % 10 == 0:
            yield row | {"save_seconds": 9.0, "save_stall_seconds": 4.0}


def slowly(rows: list[dict], attempts: list[dict]) -> tuple[float, float, int]:
    """Node-seconds lost and used, and failures, by every row of all attempts."""
    trained = [row for row in rows if "learning_rate" in row]
    by_attempt = {
        number: sorted(
            (row for row in trained if row["attempt"] == number), key=lambda row: row["step"]
        )
        for number in range(1, len(attempts) + 1)
    }
    with_updates = [number for number in by_attempt if by_attempt[number]]
    starts = {
        number: by_attempt[number][0]["time"] - attempts[number - 1]["began"]
        for number in with_updates
    }
    usual = sorted(starts.values())
    usual_start = (usual[(len(usual) - 1) // 2] + usual[len(usual) // 2]) / 2
    lost = used = 0.0
    failures = 0
    for number, own in by_attempt.items():
        nodes = len(attempts[number - 1]["nodes"][0]["hosts"])
        if not own:
            gap = attempts[number]["began"] - attempts[number - 1]["began"]
            lost += nodes * min(usual_start, gap)
            used += nodes * min(usual_start, gap)
            continue
        used += nodes * (own[-1]["time"] - attempts[number - 1]["began"])
        lost += nodes * starts[number] if number != with_updates[0] else 0.0
        for before, row in pairwise(own):
            again = [other for other in trained if other["step"] == row["step"]]
            if any(other["attempt"] > number for other in again):
                lost += nodes * (row["time"] - before["time"])
        later = [row for row in trained if row["attempt"] > number]
        following = min((row["attempt"] for row in later), default=None)
        resumed = [row["step"] for row in later if row["attempt"] == following]
        failures += bool(resumed) and min(resumed) <= own[-1]["step"]
    return lost, used, failures


def random_history(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Attempts and rows of a run that crashes, is stopped after a save, fails to start, and ends."""
    attempts, rows = list[dict](), list[dict]()
    now, step = 1e9, 0
    for number in range(1, rng.randint(2, 7) + 1):  # and one more
        now += rng.uniform(10, 5000)
        attempts.append(attempt_on(rng.choice([1, 2, 4]), now))
        now += rng.uniform(5, 300)
        if rng.random() < 0.25:
            continue  # a start in vain
        first, count, pace = step + 1, rng.randint(1, 60), rng.uniform(0.5, 3)
        rows += updates(number, range(first, first + count), now, pace)
        now += pace * (count - 1)
        reached = first + count - 1
        # stopped with a save, or crashed: from the newest multiple of ten, or one before
        step = rng.choice([reached, 10 * (reached // 10), max(0, 10 * (reached // 10 - 2))])
    now += 10_000
    attempts.append(attempt_on(2, now))  # so that no start in vain is the newest
    last = max(step + 1, *(row["step"] for row in rows)) if rows else 20
    rows += updates(len(attempts), range(step + 1, last + 1), now + 50, 1.0)
    return attempts, rows


@pytest.mark.parametrize("seed", range(12))
def test_losses_are_those_of_every_row(tmp_path, seed):
    attempts, rows = random_history(random.Random(seed))
    write_run(RunDirectory(tmp_path), attempts, rows)
    works = history(RunDirectory(tmp_path))
    lost, used, failures = slowly(rows, attempts)
    losses = losses_of(works)
    assert (losses.lost, losses.used) == pytest.approx((lost, used), rel=1e-9)
    assert losses.failures == failures
    left = {row["step"]: row["attempt"] for row in rows if "learning_rate" in row}
    kept = [list(left.values()).count(number) for number in range(1, len(attempts) + 1)]
    assert surviving(works) == kept


def lost_by(tmp_path: Path, attempts: list[dict], rows: list[dict], *more: str) -> str | None:
    """Return the words on a study of one run, or of `more`."""
    runs = [RUN.model_copy(update={"save_steps": (RUN.total_steps,)})]
    runs[0] = runs[0].model_copy(
        update={"saving": RUN.saving.model_copy(update={"restart_every_steps": 10})}
    )
    write_run(RunDirectory(tmp_path / RUN.name), attempts, rows)
    runs += [OTHER] if more else []
    return lost_to_restarts(tmp_path, runs)


CRASHED = [attempt_on(4, 0.0), attempt_on(4, 3000.0)]
# The second attempt begins again from step 50.
ROWS = [*updates(1, range(1, 60), 100.0, 2.0), *updates(2, range(51, 301), 3060.0, 2.0)]


def test_the_words_name_hours_failures_and_the_interval(tmp_path):
    # 9 updates of 2 s and a start of 60 s, of starts of 160 s and updates of 116 s and 498 s
    words = present(lost_by(tmp_path, CRASHED, ROWS))
    hours = f"{4 * 78 / HOUR:.2g} node-hours of {4 * (160 + 116 + 498) / HOUR:.2g}"
    assert words.startswith(f"lost to restarts: {hours} (1 failure); saving every ")
    # C is 4 s, and M all the time of updates
    best, low, high = (best_interval(4.0, mean) for mean in between_failures(1, 614.0))
    expected = [round(float(f"{seconds / 2.0:.2g}")) for seconds in (best, low, high)]
    assert words.endswith(
        f"saving every {expected[0]} updates [{expected[1]}, {expected[2]}] would have lost least,"
        " now 10"
    )
    assert 0 < expected[1] < expected[0] < expected[2]
    named = present(lost_by(tmp_path, CRASHED, ROWS, "other"))
    assert f"saving {RUN.name} every {expected[0]} updates" in named


def test_a_stop_after_a_save_costs_its_next_start_alone(tmp_path):
    rows = [*updates(1, range(1, 61), 100.0, 2.0), *updates(2, range(61, 301), 3060.0, 2.0)]
    words = present(lost_by(tmp_path, CRASHED, rows))
    hours = f"{4 * 60 / HOUR:.2g} node-hours of {4 * (100 + 118 + 60 + 478) / HOUR:.2g}"
    assert words == f"lost to restarts: {hours} (no failure, so no interval follows)"


def test_nothing_is_said_where_nothing_was_lost(tmp_path):
    rows = list(updates(1, range(1, 301), 100.0, 2.0))
    assert lost_by(tmp_path, CRASHED[:1], rows) is None
    assert lost_by(tmp_path, [{"host": "node1"}] * 2, rows) is None, "an older record"
    assert lost_to_restarts(tmp_path / "empty", [RUN]) is None
